"""The CUDA frame as a program for the auditor's proof without a GPU.

`slipstream audit prove slipstream.benchmark.frame_program:build` runs the production frame under fake CUDA tensors:
control upload, decode frame, prefill chunk, packed records. What cannot exist without a GPU (graphs, events, the copy
down) is not in it; those are the lines of device/graphs.py and RecordRing.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slipstream.attention.windows import WindowLayers
from slipstream.audit import Program
from slipstream.config import EngineConfig
from slipstream.device.catch_up import CatchUp
from slipstream.device.control import ControlWriter
from slipstream.device.frame import Frame
from slipstream.device.masks import MaskRing
from slipstream.device.media import EmbedRing
from slipstream.device.staging import UploadRing
from slipstream.device.state import SlotState
from slipstream.draft.block_config import parse_block_config
from slipstream.draft.block_model import BlockModel, block_shapes
from slipstream.draft.dflash import BlockDrafter
from slipstream.draft.eagle3 import Eagle3Drafter
from slipstream.draft.eagle3_config import parse_eagle3
from slipstream.draft.eagle3_model import dummy_eagle3
from slipstream.draft.feature import FeatureDrafter
from slipstream.draft.feature_tree import FeatureTreeDrafter
from slipstream.draft.mtp import MTPDrafter
from slipstream.draft.mtp_model import MTPModel, mtp_shapes, parse_mtp
from slipstream.draft.ngram import NgramDrafter
from slipstream.draft.protocol import Drafter
from slipstream.draft.standalone import StandaloneDrafter
from slipstream.draft.suffix import SuffixDrafter
from slipstream.draft.tree import TreeShape
from slipstream.kernels.tuning import PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.memory.states import StatePool
from slipstream.models.config import parse_hf_config
from slipstream.models.decoder import Decoder
from slipstream.models.delta_net import state_shape
from slipstream.models.dummy import DummyTensors, DummyWeights
from slipstream.models.fused import FusedDecoder
from slipstream.models.fused_hybrid import FusedHybrid
from slipstream.models.mrope import Media
from slipstream.models.registry import model_class
from slipstream.models.weights import WeightBuilder
from slipstream.structured import Masks
from slipstream.types import RECORD_COLUMNS, Admit, FramePlan, PageAppend, PrefillSpan, Request, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip

HYBRID = {
    **CONFIG, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
"""One recurrent layer and one of attention."""

PICTURES = {
    **CONFIG, "image_token_id": 9, "vision_config": {"spatial_merge_size": 1},
    "rope_parameters": {"rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}  # fmt: skip
"""A rotary embedding with positions on three axes."""

PICTURES_HYBRID = {
    **HYBRID, "image_token_id": 9, "vision_config": {"spatial_merge_size": 1},
    "rope_parameters": {
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip

WINDOWS = {
    **CONFIG, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 24,
    "sliding_window_pattern": 2, "query_pre_attn_scalar": 16,
}  # fmt: skip
"""One layer with a sliding window and one without."""

TREE = TreeShape(topk=2, levels=3, total=4)

CHUNK = 512
"""Rows of the prefill chunk, most of them padding."""

KERNELS = (
    "slipstream::norm_prepare",
    "slipstream::stream_rope",
    "slipstream::paged_attention",
    "slipstream::stream_residual",
    "slipstream::stream_swiglu",
    "slipstream::stream_head",
    "slipstream::argmax_finish",
    "slipstream::pack_rows",
    "slipstream::ngram_draft",
)

SAMPLED = ("slipstream::row_threshold", "slipstream::race_rows", "slipstream::close_sampled")
GREEDY = ("slipstream::close_greedy",)

LIBRARY_KERNELS = (
    "slipstream::norm_prepare",
    "slipstream::rope_kv_write",
    "slipstream::paged_attention",
    "slipstream::residual_prepare",
    "slipstream::silu_mul",
    "slipstream::rms_norm",
    "slipstream::argmax_rows",
    "slipstream::pack_rows",
    "slipstream::ngram_draft",
)
"""In a frame of so many rows that the library multiplies."""

TREE_KERNELS = ("slipstream::tree_rows", "slipstream::compact_path", "slipstream::close_round")

SCHEDULE_KERNELS = ("slipstream::allot_drafts", "slipstream::offer_scheduled")

BLOCK_KERNELS = ("slipstream::block_rows", "slipstream::context_write", "slipstream::markov_head")

EAGLE_KERNELS = ("slipstream::feature_rows", "slipstream::join_norms", "slipstream::stream_linear")

MTP_KERNELS = ("slipstream::feature_rows", "slipstream::join_norms", "slipstream::stream_linear")

REQUEST_KERNELS = (
    "slipstream::adjust_rows",
    "slipstream::mask_rows",
    "slipstream::recount_slots",
    "slipstream::count_tokens",
    "slipstream::token_logprobs",
)

HYBRID_KERNELS = (
    "slipstream::delta_rows",
    "slipstream::delta_absorb",
    "slipstream::delta_prompt",
    "slipstream::gated_norm",
    "slipstream::gated_rope_write",
    "slipstream::gate_mul",
    "slipstream::stream_linear",
    "slipstream::paged_attention",
    "slipstream::pack_rows",
    "slipstream::ngram_draft",
)

PLAIN_KERNELS = ("slipstream::paged_attention", "slipstream::prefill_attention", "slipstream::pack_rows")
"""Where the fused pass does not fit the model."""


def build(kind: str = "greedy", plant: str = "") -> Program:
    """One launch with everything in it: admissions, page appends, a decode frame of 4 slots, a prefill chunk.

    kind: greedy; sampled; suffix: greedy, dspark: sampled, with that drafter instead of n-gram; scheduled,
    scheduled-sampled: with DSpark drafts whose confidences share out fewer rows than there are drafts; eagle3,
    eagle3-sampled: with an EAGLE-3 head; mtp, mtp-sampled: with an MTP head; eagle3-off, mtp-off: with one that catches
    up before a frame without drafting; tree, tree-sampled: with an EAGLE-3 head that drafts trees; library: greedy with
    the kernels that stand between library products; grammar: greedy, with masks going up; requests,
    requests-tree: sampled, with all that only some requests ask for; model: sampled, with drafts by a model, and the
    plain pass for both; windows, windows-tree: a target with a sliding window in one layer; pictures: one whose rotary
    embedding has three axes, and a prompt with a picture beside text, by the plain pass; hybrid: a target with a
    recurrent layer, whose states are saved for a prefix cache; mtp-hybrid: the same with its MTP head; or
    pictures-hybrid: the same with a picture beside text, by the fused pass. plant: "module:function" that puts a
    known fault back into a production function, to see that the proof turns red (tests/unit/test_frame_proof.py).
    """
    device, slots, drafts, page = torch.device("cuda:0"), 8, 3, 16
    engine = EngineConfig(
        max_slots=slots, page_size=page, num_pages=64, max_model_len=128, num_drafts=drafts, lookahead=1 + TREE.expanded
    )
    hybrid, windowed, pictures = kind.endswith("hybrid"), kind.startswith("windows"), kind.startswith("pictures")
    values = (PICTURES_HYBRID if pictures else HYBRID) if hybrid else WINDOWS if windowed else CONFIG
    values = PICTURES if pictures and not hybrid else values
    config = parse_hf_config(dict(values))
    weights = WeightBuilder(DummyWeights(config, seed=0, device=device), device=device, dtype=torch.bfloat16)
    model = model_class(config.architecture)(config, weights)
    assert isinstance(model, Decoder)
    of_each_kind = [
        KVPages(
            num_layers=layers, num_pages=engine.num_pages, page_size=page, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, dtype=torch.bfloat16, device=device,
        )
        for layers in WindowLayers.counts(config.windows)
    ]  # fmt: skip
    kv = of_each_kind[0]
    workspace, tree = Workspace(device), TREE if "tree" in kind else None
    every, scheduled = kind.startswith("requests"), kind.startswith("scheduled")
    sampled = every or kind in ("sampled", "dspark", "model") or kind.endswith("-sampled")
    drafter: Drafter = NgramDrafter(slots=slots, max_drafts=drafts, device=device)
    if kind == "suffix":
        drafter = SuffixDrafter(max_drafts=drafts)
    if kind == "dspark" or scheduled:
        drafter = _block_drafter(model, engine, workspace, confident=scheduled)
    if kind.startswith("eagle3") or tree is not None:
        drafter = _eagle_drafter(model, engine, workspace, tree)
    if kind.startswith("mtp"):
        drafter = _mtp_drafter(model, engine, workspace)
    if kind == "model":
        drafter = StandaloneDrafter(model, kv=kv, max_drafts=drafts, workspace=workspace)
    state = SlotState(
        max_slots=slots, max_len=engine.max_model_len, pages_per_slot=engine.pages_per_slot, num_drafts=drafts,
        chunk_rows=CHUNK, device=device, draft_vocab=drafter.draft_vocab, tree=tree is not None, scheduled=scheduled,
        saved_states=engine.max_model_len // 64 + 2 if hybrid else 0, windows=windowed, pictures=pictures,
        given=pictures,
    )  # fmt: skip
    cut = PassConfig(rope=0, residual=0, silu=0, head=0) if kind == "library" else PassConfig()
    plain = kind in ("model", "pictures") or windowed
    fused = None if plain else (FusedHybrid if hybrid else FusedDecoder)(model, kv, workspace, config=cut)
    frame = Frame(
        model=model, kv=kv, state=state, drafter=drafter, fused=fused, workspace=workspace, tree=tree,
        states=_states(model, state, slots, drafts) if hybrid else None,
        windows=WindowLayers.of(config.windows, of_each_kind[1]),
    )  # fmt: skip
    if kind.endswith("-off"):
        frame.catch_up = CatchUp(
            drafter, state, ring=16, page_size=page, hidden_size=config.hidden_size, dtype=torch.bfloat16
        )
    if plant:
        module, _, name = plant.partition(":")
        getattr(importlib.import_module(module), name)()
    control = ControlWriter(state.offset, state.shapes, num_drafts=drafts)
    ring = UploadRing(state.arena, slots=3, capacity=state.arena.numel())
    masks = MaskRing(frame.logit_stages.masks, slots=3)
    embeds = EmbedRing(frame.given, slots=3)
    plans = [_plan(i, slots, sampled) for i in range(2)]
    if every:
        names = ("penalties", "biases", "logprobs", "prompt_logprobs", "min_tokens")
        promises: dict[str, Any] = dict.fromkeys(names, True)
        plans = [p._replace(**promises) for p in plans]
    if windowed:
        plans = [p._replace(window_pages=p.pages) for p in plans]
    if pictures:
        plans = [p._replace(admits=(_with_picture(p, model),)) for p in plans]
    if hybrid:
        plans = [p._replace(admits=(replace(p.admits[0], restores=1, absorbed=2),)) for p in plans]
    if kind == "grammar" or every:
        given = np.full((1 + drafts, config.vocab_size // 32), -1, dtype=np.int32)
        plans = [p._replace(masked=True, masks=(Masks(1, given), Masks(5 + p.seq, given[:1]))) for p in plans]
    if scheduled:
        plans = [plan._replace(rows=8) for plan in plans]
    turn = iter(range(1 << 30))

    def one() -> None:
        plan = plans[next(turn) % 2]
        with torch.inference_mode():
            ring.send(control.pairs(plan))
            if plan.masks:
                masks.send(plan.masks)
            if frame.catch_up is not None:
                plan = plan._replace(drafts=0)
                frame.read_missing(plan, state.decode_B[: len(plan.decode)])
            record_BC = frame.decode(plan, state.decode_B[: len(plan.decode)])
            assert record_BC.shape[1] == RECORD_COLUMNS + plan.width + (drafts if scheduled else 0)
            for admit in plan.admits:
                frame.admit(admit)
            if frame.given.media:
                embeds.send(plan)
            assert frame.prefill(plan, last=True) is not None

    kernels = {"library": LIBRARY_KERNELS, "model": PLAIN_KERNELS, "hybrid": HYBRID_KERNELS}.get(
        "hybrid" if hybrid else "model" if plain else kind, KERNELS
    )
    if kind in ("dspark", "suffix") or scheduled or isinstance(drafter, FeatureDrafter):
        kernels = tuple(name for name in kernels if name != "slipstream::ngram_draft")
    if kind == "dspark" or scheduled:
        kernels = (*kernels, *BLOCK_KERNELS, *(() if sampled else ("slipstream::markov_next",)))
    if scheduled:
        kernels = (*kernels, *SCHEDULE_KERNELS)
    if kind == "suffix":
        kernels = (*kernels, "slipstream::suffix_places", "slipstream::suffix_walk")
    if isinstance(drafter, FeatureDrafter):
        kernels = (*kernels, *(MTP_KERNELS if kind.startswith("mtp") else EAGLE_KERNELS))
    if tree is not None:
        kernels = (*kernels, *TREE_KERNELS, *(() if sampled else ("slipstream::walk_trees",)))
    if kind == "grammar":
        kernels = tuple(name for name in kernels if name != "slipstream::argmax_finish")
        kernels = (*kernels, "slipstream::adjust_rows", "slipstream::mask_rows", "slipstream::argmax_rows")
    if every:
        kernels = tuple(name for name in kernels if name != "slipstream::argmax_finish")
        kernels = (*kernels, *REQUEST_KERNELS)
    return Program(one, 2, (*kernels, *(SAMPLED if sampled else GREEDY)))


def _states(model: Decoder, state: SlotState, slots: int, drafts: int) -> StatePool:
    shape = state_shape(model.config)
    assert shape is not None
    return StatePool(
        shape, max_slots=slots, saved=4, rows=drafts + 1, absorbed_S=state.absorbed_S, saved_SC=state.saved_SC,
        interval=64, dtype=model.dtype, device=model.device,
    )  # fmt: skip


def _block_drafter(model: Decoder, engine: EngineConfig, workspace: Workspace, *, confident: bool) -> Drafter:
    """A DSpark drafter with every head, on random weights."""
    block = parse_block_config(
        {
            **CONFIG, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 0,
            "target_layer_ids": [-1, 0], "markov_rank": 16, "markov_head_type": "rnn", "enable_confidence_head": True,
        },
        model.config,
    )  # fmt: skip
    shapes = block_shapes(block, model.config.hidden_size)
    source = DummyTensors(shapes, seed=1, device=model.device)
    network = BlockModel(block, WeightBuilder(source, device=model.device, dtype=model.dtype), model)
    c = block.shape
    kv = KVPages(
        num_layers=c.num_layers, num_pages=engine.num_pages, page_size=engine.page_size, num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim, dtype=model.dtype, device=model.device,
    )  # fmt: skip
    return BlockDrafter(
        network, kv=kv, max_drafts=engine.num_drafts, workspace=workspace, confidence_threshold=0.5, confident=confident
    )


def _eagle_drafter(model: Decoder, engine: EngineConfig, workspace: Workspace, tree: TreeShape | None) -> Drafter:
    """An EAGLE-3 head over a part of the vocabulary, on random weights."""
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1], "draft_vocab_size": 100, "num_hidden_layers": 1}
    head = dummy_eagle3(parse_eagle3({**CONFIG, **ids}, model.config), model, seed=1)
    c = head.config
    kv = KVPages(
        num_layers=c.num_layers, num_pages=engine.num_pages, page_size=engine.page_size, num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim, dtype=model.dtype, device=model.device,
    )  # fmt: skip
    options: dict[str, Any] = {"max_drafts": engine.num_drafts, "max_len": engine.max_model_len, "workspace": workspace}
    if tree is None:
        return Eagle3Drafter(head, kv=kv, **options)
    return FeatureTreeDrafter(head, kv=kv, shape=tree, **options)


def _mtp_drafter(model: Decoder, engine: EngineConfig, workspace: Workspace) -> Drafter:
    """An MTP head on random weights."""
    config = parse_mtp({}, model.config)
    source = DummyTensors(mtp_shapes(config), seed=1, device=model.device, offset=config.layer.norm_offset)
    head = MTPModel(config, source, model)
    c = head.config
    kv = KVPages(
        num_layers=c.num_layers, num_pages=engine.num_pages, page_size=engine.page_size, num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim, dtype=model.dtype, device=model.device,
    )  # fmt: skip
    return MTPDrafter(head, kv=kv, max_drafts=engine.num_drafts, max_len=engine.max_model_len, workspace=workspace)


def _with_picture(plan: FramePlan, model: Decoder) -> Admit:
    """The prompt's tokens 1 and 2 are a picture of 1 x 2: the batch has it beside text."""
    positions = np.array([[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]])
    embeds = torch.zeros(2, model.config.hidden_size, dtype=model.dtype)
    media = Media(positions=positions, delta=0, embeds=embeds, places=np.array([1, 2]), key="")
    admit = plan.admits[0]
    return replace(admit, request=replace(admit.request, media=media))


def _plan(seq: int, slots: int, sampled: bool) -> FramePlan:
    params = SamplingParams(
        temperature=0.7 if sampled else 0, top_p=0.9 if sampled else 1, max_tokens=8, logprobs=5, logit_bias={7: 1.0},
        presence_penalty=0.5,
    )  # fmt: skip
    slot = 5 + seq
    request = Request(request_id=str(seq), prompt_token_ids=(1, 2, 3, 4), params=params, max_len=12)
    return FramePlan(
        seq=seq,
        admits=(Admit(slot=slot, generation=seq + 1, request=request, tokens=(1, 2, 3, 4), start=0, pages=(9,)),),
        pages=(PageAppend(slot=1, first=1, pages=(20 + seq,)),), decode=(1, 2, 3, 4), rows=16, width=4, len_ub=128,
        first_page=(-1,) * 4, prefill=(PrefillSpan(slot=slot, start=0, length=4, last=True),), prefill_first_page=(-1,),
        prefill_rows=CHUNK, prefill_prompts=2, drafts=3, sampled=sampled, filtered=sampled, rejection=sampled,
        coupled=sampled,
    )  # fmt: skip
