"""Equality cells: one engine run per combination of features, its output against a known continuation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from slipstream import LLM, SamplingParams
from slipstream.kernels.workspace import Workspace
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.kit import VOCAB, perturb, tiny_model_dir
from tests.support.mtp import add_mtp
from tests.support.reference import planted_oracle
from tests.support.tree_oracle import oracle_tree

FACTORS: dict[str, Sequence[Any]] = {
    "drafter": (
        *("none", "ngram", "suffix", "oracle", "draft-good", "draft-bad", "eagle3", "dflash", "dspark"),
        *("mtp", "oracle-tree", "eagle3-tree"),
    ),
    "sampling": ("greedy", "seeded", "mixed"),
    "batch": (1, 4, 16),
    "page_size": (1, 16),
    "prefix": ("miss", "hit"),
    "chunk": (5, 256),
    "event": ("none", "preempt", "abort", "stop"),
    "run_ahead": (1, 2, 8),
    "shapes": ("exact", "buckets"),
}
MAX_TOKENS = 24
TREE = {"topk": 3, "levels": 3, "total": 8}


class Reference(Protocol):
    def continuation(self, prompt: tuple[int, ...], params: SamplingParams, child: int = 0) -> list[int]: ...


def model_dirs(root: Path, **changes: Any) -> dict[str, Path]:
    """A target, a draft that is often right, one that hardly ever is, a random EAGLE-3 head, an MTP head that
    the target's checkpoint holds, random block drafts."""
    target = add_mtp(tiny_model_dir(root / "target", seed=1, **changes))
    return {
        "target": target,
        "draft-good": perturb(target, root / "good", scale=0.02),
        "draft-bad": tiny_model_dir(root / "bad", seed=9, layers=1, **changes),
        "eagle3": write_eagle3(root / "eagle3", target, draft_vocab=24),
        "mtp": Path("mtp"),
        "dflash": write_block_draft(root / "dflash", target, "dflash"),
        "dspark": write_block_draft(root / "dspark", target, "dspark", head="gated"),
    }


def as_on_a_gpu(llm: LLM) -> None:
    """The engine's frames out of the kernels' ops, each by its definition."""
    frame = llm._built.device.frame
    frame.workspace, frame.kernels = Workspace("cpu", floats=8, counters=8), True
    frame.cache.workspace, frame.logit_stages.kernels = frame.workspace, True
    frame.laws = frame.state.laws()
    if hasattr(frame.drafter, "workspace"):
        frame.drafter.workspace = frame.workspace


def make_params(cell: dict[str, Any], i: int, max_tokens: int) -> SamplingParams:
    kind = cell["sampling"] if cell["sampling"] != "mixed" else ("greedy", "seeded", "filtered")[i % 3]
    if kind == "greedy":
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    extra: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.02} if kind == "filtered" else {}
    return SamplingParams(temperature=0.8, seed=100 + i, max_tokens=max_tokens, ignore_eos=True, **extra)


def run_cell(
    cell: dict[str, Any],
    dirs: dict[str, Path],
    reference: Reference,
    *,
    prepare: Callable[[LLM], None] = lambda llm: None,
    **options: Any,
) -> None:
    """Run the cell and assert its output. `options` go to LLM; `prepare` sees the engine before its first request."""
    rng = random.Random(str(sorted(cell.items())))
    batch = cell["batch"]
    shared = tuple(rng.randrange(VOCAB) for _ in range(40))
    prompts = [
        (shared if cell["prefix"] == "hit" else ()) + tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))
        for _ in range(batch)
    ]
    params = [make_params(cell, i, MAX_TOKENS) for i in range(batch)]
    oracle = planted_oracle(
        lambda r: reference.continuation(r.prompt_token_ids, r.params, r.child), vocab=VOCAB, seed=3
    )
    drafter = cell["drafter"].removesuffix("-tree")
    tree = TREE if drafter != cell["drafter"] else None
    oracles = {"oracle": oracle if tree is None else oracle_tree(oracle)}
    draft: Any = {"none": None, "ngram": "ngram", "suffix": "suffix", **oracles}.get(drafter, str(dirs.get(drafter)))
    longest = max(len(p) for p in prompts) + MAX_TOKENS
    page = cell["page_size"]
    one = -(-(longest + 8) // page)
    # Under pressure the pool holds little more than one sequence.
    pages = one + one // 2 + 2 if cell["event"] == "preempt" else one * (batch + 2)
    if cell["shapes"] == "buckets":
        options = {"slot_buckets": (1, 2, 4, 8, 16), "row_tiers": (1, 2, 4, 8), **options}
    elif cell["shapes"] == "padded":  # every frame is as large as the largest
        options = {"slot_buckets": (16,), "row_tiers": (4 if tree is None else tree["total"],), **options}
    llm = LLM(
        model=str(dirs["target"]), draft=draft, num_drafts=None if draft is None or tree else 3, draft_tree=tree,
        run_ahead=cell["run_ahead"], page_size=page, num_pages=pages, prefill_chunk=cell["chunk"],
        max_slots=max(16, batch), max_model_len=longest, **options,
    )  # fmt: skip
    prepare(llm)
    if cell["prefix"] == "hit":
        llm.generate(list(shared), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    want = [reference.continuation(p, s) for p, s in zip(prompts, params, strict=True)]
    if cell["event"] == "abort":
        assert _with_abort(llm, prompts, params) == want
    elif cell["event"] == "stop":
        # The stop string is the text of a token pair from the middle of each continuation.
        stopped = []
        for tokens, s in zip(want, params, strict=True):
            text = llm.tokenizer.decode(tokens[8:10]).strip()
            stopped.append(SamplingParams(**{**fields_of(s), "stop": [text]}))
        outs = llm.generate([list(p) for p in prompts], stopped)
        for out, tokens, s in zip(outs, want, stopped, strict=True):
            n, text = cut_by_hand(llm, tokens, s.stop[0])
            assert out.outputs[0].finish_reason == "stop"
            assert out.outputs[0].token_ids == tokens[:n]
            assert out.outputs[0].text == text
    else:
        outs = llm.generate([list(p) for p in prompts], params)
        assert [o.outputs[0].token_ids for o in outs] == want
        assert all(o.outputs[0].finish_reason == "length" for o in outs)
        if cell["drafter"] in ("oracle", "oracle-tree", "draft-good"):
            assert sum(o.spec.accepted for o in outs) > 0
    llm.check_idle()


def _with_abort(llm: LLM, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[list[int]]:
    """Outputs of all prompts while one more request, a twin of the first, leaves in the middle."""
    victim = llm.stream(list(prompts[0]), params[0])
    next(victim)
    rest = [llm._submit(*llm._prepare(list(p), s)) for p, s in zip(prompts, params, strict=True)]
    got: dict[str, list[int]] = {}
    for turn in range(10_000):
        if turn == 2:
            victim.close()
        for chunk in llm._step():
            if chunk.output is not None:
                got[chunk.output.request_id] = chunk.output.outputs[0].token_ids
        if all(r in got for r in rest):
            break
    return [got[r] for r in rest]


def fields_of(s: SamplingParams) -> dict[str, Any]:
    """The options of a request without its stop strings."""
    return {k: getattr(s, k) for k in ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "ignore_eos")}


def cut_by_hand(llm: LLM, tokens: list[int], stop: str) -> tuple[int, str]:
    """Fewest tokens whose text contains the stop string, and the text before it."""
    for n in range(1, len(tokens) + 1):
        text = llm.tokenizer.decode(tokens[:n])
        if stop in text:
            return n, text[: text.index(stop)]
    raise AssertionError("the stop string does not occur")
