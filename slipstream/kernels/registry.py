"""Every kernel op by name: what a proof must see reached.

Names are those of `torch.ops.slipstream`. `load()` imports the modules that define the ops, not Triton.
"""

from __future__ import annotations

from importlib import import_module

KERNELS: dict[str, str] = {
    "stream_linear": "slipstream.kernels.gemm",
    "stream_swiglu": "slipstream.kernels.gemm",
    "stream_residual": "slipstream.kernels.gemm",
    "stream_head": "slipstream.kernels.gemm",
    "stream_rope": "slipstream.kernels.gemm",
    "markov_head": "slipstream.kernels.gemm",
    "paged_attention": "slipstream.kernels.attention",
    "prefill_attention": "slipstream.kernels.prefill",
    "rope_kv_write": "slipstream.kernels.rope",
    "rms_norm": "slipstream.kernels.norm",
    "residual_norm": "slipstream.kernels.norm",
    "norm_prepare": "slipstream.kernels.norm",
    "residual_prepare": "slipstream.kernels.norm",
    "silu_mul": "slipstream.kernels.norm",
    "argmax_rows": "slipstream.kernels.sample",
    "argmax_finish": "slipstream.kernels.sample",
    "row_threshold": "slipstream.kernels.sample",
    "race_rows": "slipstream.kernels.sample",
    "mask_rows": "slipstream.kernels.grammar",
    "draft_choice": "slipstream.kernels.choice",
    "adjust_rows": "slipstream.kernels.adjust",
    "recount_slots": "slipstream.kernels.adjust",
    "count_tokens": "slipstream.kernels.adjust",
    "token_logprobs": "slipstream.kernels.logprobs",
    "pack_rows": "slipstream.kernels.frame",
    "close_round": "slipstream.kernels.frame",
    "close_greedy": "slipstream.kernels.frame",
    "close_sampled": "slipstream.kernels.frame",
    "ngram_draft": "slipstream.kernels.draft",
    "offer_drafts": "slipstream.kernels.draft",
    "offer_scheduled": "slipstream.kernels.schedule",
    "allot_drafts": "slipstream.kernels.schedule",
    "suffix_places": "slipstream.kernels.suffix",
    "suffix_walk": "slipstream.kernels.suffix",
    "feature_rows": "slipstream.kernels.eagle",
    "tree_rows": "slipstream.kernels.tree",
    "compact_path": "slipstream.kernels.tree",
    "walk_trees": "slipstream.kernels.tree",
    "delta_rows": "slipstream.kernels.delta_ops",
    "delta_absorb": "slipstream.kernels.delta_ops",
    "delta_prompt": "slipstream.kernels.delta_ops",
    "gated_norm": "slipstream.kernels.gated",
    "gated_rope_write": "slipstream.kernels.gated",
    "gate_mul": "slipstream.kernels.gated",
    "join_norms": "slipstream.kernels.eagle",
    "block_rows": "slipstream.kernels.block",
    "context_write": "slipstream.kernels.block",
    "markov_next": "slipstream.kernels.block",
}
"""Op name -> module that defines it."""


def load() -> dict[str, str]:
    """Define all ops and return KERNELS. Raises ImportError when a module is missing."""
    for module in sorted(set(KERNELS.values())):
        import_module(module)
    return dict(KERNELS)
