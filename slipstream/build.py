"""From a user's options to the built parts: model, tokenizer, drafter, pages, frame, engine configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream import __version__
from slipstream.answers import Limits
from slipstream.attention.windows import WindowLayers
from slipstream.config import EngineConfig, LLMConfig, resolve_engine
from slipstream.device import costs
from slipstream.device.catch_up import CatchUp
from slipstream.device.frame import Frame
from slipstream.device.media import takes_embeds
from slipstream.device.runner import Device
from slipstream.device.state import SlotState
from slipstream.draft.detect import OWN, Head, load_head, unknown_draft
from slipstream.draft.make import make_drafter
from slipstream.draft.protocol import ConfidentDrafter, Drafter
from slipstream.draft.tree import TreeShape
from slipstream.errors import ConfigError, ModelLoadError, UnsupportedError
from slipstream.memory.host import keep_large_temporaries
from slipstream.memory.kv import KVPages
from slipstream.memory.states import StatePool, StateShape
from slipstream.models.delta_net import state_shape
from slipstream.models.loader import HAS_HEAD, LoadedModel, load_model
from slipstream.sampling.custom import load_processors
from slipstream.text import Tokenizer
from slipstream.text.grammar import Grammars

if TYPE_CHECKING:
    from slipstream.kernels.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class Built:
    """Everything an engine needs, ready to run.

    tokenizer_source: file or folder that the tokenizer came from. resolved: what was decided, for people and
    /server_info.
    """

    model: Any
    tokenizer: Tokenizer
    tokenizer_source: Path | None
    generation_config: dict[str, Any]
    limits: Limits
    grammars: Grammars
    engine_config: EngineConfig
    device: Device
    resolved: dict[str, Any]
    notes: list[str]


def build(config: LLMConfig, progress: Callable[[int, int], None] | None = None) -> Built:
    """Load and wire everything. Raises ConfigError and ModelLoadError before anything runs.

    progress: called with (graphs captured, graphs in all) while a GPU's frames are captured.
    """
    device = _device(config.device)
    if device.type == "cpu":
        keep_large_temporaries()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = _load(config, config.model, device)
    model = loaded.model
    source = _tokenizer_source(config, loaded)
    tokenizer = Tokenizer.from_path(source)
    num_drafts = config.drafts
    draft_loaded, head = None, None
    if config.draft == OWN and HAS_HEAD in loaded.notes:
        loaded.notes.remove(HAS_HEAD)
    if num_drafts and isinstance(config.draft, str) and config.draft not in ("none", "ngram", "suffix"):
        try:
            head = load_head(
                config.draft, model, home=loaded.source, revision=config.revision, load_format=config.load_format,
                seed=config.seed, dense=config.draft_weights == "dense",
            )  # fmt: skip
            draft_loaded = _load(config, config.draft, device) if head is None else None
        except ModelLoadError as error:
            raise ModelLoadError(f"draft={config.draft!r}{unknown_draft(config.draft)}: {error}") from None
        if config.num_drafts is None and head is not None:
            num_drafts = getattr(head.model, "max_drafts", num_drafts)
        if draft_loaded is not None:
            _check_draft(config, loaded, draft_loaded, tokenizer)
    _check_confidence(config, head)
    shape = _tree(config, head)
    if shape is not None:
        num_drafts = shape.total - 1
    recurrent = _recurrent(model, draft_loaded, shape)
    kv_models = [model] + ([draft_loaded.model] if draft_loaded else []) + ([head.model] if head else [])
    _check_windows(model, shape)
    full, windowed = WindowLayers.counts(model.config.windows)
    layers = [full] + [len(m.config.kv_layers) for m in kv_models[1:]]
    token_bytes = sum(_token_bytes(m, n) for m, n in zip(kv_models, layers, strict=True))
    # A head goes as far as the target, whatever length it was trained on.
    context = min(m.config.max_position_embeddings for m in kv_models if head is None or m is not head.model)
    engine = resolve_engine(
        config, context=context, num_drafts=num_drafts,
        lookahead=_lookahead(num_drafts, shape) if draft_loaded or (head and head.drafter.lookahead) else 0,
        tree_depth=0 if shape is None else shape.depth,
        rereads=head.drafter.rereads if head is not None else 0,
        eos_ids=len(_eos_ids(loaded, tokenizer)), kv_bytes_per_token=token_bytes,
        memory_bytes=_kv_budget(config, device), on_cpu=device.type == "cpu",
        slot_bytes=0 if recurrent is None else StatePool.bytes_for(recurrent, 1, 0, num_drafts + 1, model.dtype),
        state_bytes=0 if recurrent is None else StatePool.bytes_for(recurrent, 0, 1, num_drafts + 1, model.dtype),
        window=model.config.window, window_bytes_per_token=_token_bytes(model, windowed),
    )  # fmt: skip
    if config.prefix_cache and not engine.prefix_cache:
        loaded.notes.append("prefix_cache is off: no states of recurrent layers are saved (saved_states is 0)")
    real = torch.float64 if model.dtype == torch.float64 else torch.float32
    kv = _pages(model, engine, device, layers=full)
    windows = None
    if windowed:
        kept = _pages(model, engine, device, layers=windowed, pages=engine.window_pages)
        windows = WindowLayers.of(model.config.windows, kept)
    workspace = _workspace(device, engine, shape, kv_models)
    drafter = None
    if num_drafts:
        drafter = make_drafter(
            config, engine, draft=draft_loaded, head=head, shape=shape, device=device, real=real, workspace=workspace,
            pages=partial(_pages, engine=engine, device=device),
        )  # fmt: skip
    processors = load_processors(config.processors, model.config.vocab_size)
    state = SlotState(
        max_slots=engine.max_slots, max_len=engine.max_model_len, pages_per_slot=engine.pages_per_slot,
        num_drafts=num_drafts, chunk_rows=max(engine.prefill_chunk, engine.prefill_chunk_busy, *engine.prefill_tiers),
        widest_frame=max(engine.slot_buckets, default=0), max_stop_ids=engine.max_stop_ids,
        device=device, real=real, draft_vocab=drafter.draft_vocab if drafter else None, tree=shape is not None,
        processors=tuple(processors), saved_states=0 if recurrent is None else engine.saved_places,
        windows=windows is not None, scheduled=engine.confidence_schedule,
        pictures=bool(model.config.rope.sections), given=takes_embeds(config.prompt_embeds, model.config, device),
    )  # fmt: skip
    cuts = isinstance(drafter, ConfidentDrafter) and drafter.cuts
    # With one frame in flight and exact rows every draft that is offered gets its row.
    engine = replace(engine, late_counts=cuts and bool(engine.row_tiers or engine.run_ahead > 1))
    # A draft model keeps KV of what it drafted; blocks, trees and confidences are judged by the law of the drafts.
    plain = not (cuts or draft_loaded or shape or engine.confidence_schedule) and config.verifier == "chain"
    engine = replace(engine, grammar_drafts=plain and num_drafts > 0, draft_laws=state.draft_q is not None)
    states = None if recurrent is None else _states(recurrent, state, engine, model)
    frame = Frame(
        model=model, kv=kv, state=state, drafter=drafter, synthetic=config.synthetic_acceptance,
        block=config.verifier == "block", fused=_fused(model, kv, workspace), workspace=workspace, tree=shape,
        catch_up=_catch_up(drafter, state, engine, model), processors=processors,
        states=states, windows=windows,
    )  # fmt: skip
    graphs = _graphs(config, frame, engine, device, progress)
    report = graphs.report if graphs is not None else None
    if engine.adaptive and device.type == "cuda":
        if graphs is None:
            raise ConfigError("adaptive=True needs captured frames, which it times: leave cuda_graphs on")
        engine = replace(engine, frame_seconds=graphs.frame_seconds())
    notes = [*loaded.notes, *_capture_note(report)]
    if engine.adaptive and head is not None and head.acceptance:
        engine = replace(engine, draft_acceptance=head.acceptance)
        if device.type == "cpu":
            key = {**_cost_key(loaded, head, drafter, engine, device), "of": "modes"}
            first, said = costs.mode_seconds(frame, engine, costs.CostCache(costs.cache_folder(), key))
            engine, notes = replace(engine, mode_seconds=first), [*notes, *said]
    if engine.confidence_schedule:
        if graphs is None and device.type == "cuda":
            raise ConfigError("confidence_schedule=True needs captured frames, which it times: leave cuda_graphs on")
        cache = costs.CostCache(costs.cache_folder(), _cost_key(loaded, head, drafter, engine, device))
        seconds, said = costs.row_seconds(frame, engine, graphs, cache)
        engine, notes = replace(engine, row_seconds=seconds), [*notes, *said]
    if graphs is not None and config.prefill_chunk_busy is None:
        engine = replace(engine, prefill_chunk_busy=min(engine.prefill_chunk, graphs.busy_rows()))
    resolved = {
        "model": config.model or "default",
        "architecture": model.config.architecture,
        "device": str(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "draft": type(drafter).__name__ if drafter else "none",
        "draft_tree": None if shape is None else asdict(shape),
        "draft_weights": _weights_of(head, draft_loaded),
        "weights": loaded.weights,
        "kv_bytes": kv.nbytes,
        "window_kv": _window_report(model, engine, windowed),
        "state_bytes": 0 if states is None else states.nbytes,
        "processors": list(processors),
        "sampling_bytes": frame.logit_stages.nbytes,
        "embeds_bytes": frame.given.embeds_RH.nbytes,
        "capture": None if report is None else asdict(report),
        **{f: getattr(engine, f) for f in engine.__dataclass_fields__},
    }
    eos_ids = _eos_ids(loaded, tokenizer)
    return Built(
        model=model, tokenizer=tokenizer, tokenizer_source=source, generation_config=loaded.generation_config,
        limits=Limits(
            vocab_size=model.config.vocab_size, max_model_len=engine.max_model_len, max_stop_ids=engine.max_stop_ids,
            num_drafts=engine.num_drafts, processors=tuple(processors), eos_ids=eos_ids,
        ),
        grammars=Grammars(
            tokenizer, vocab_size=model.config.vocab_size, eos_ids=eos_ids,
            unavailable=None if config.synthetic_acceptance is None
            else "synthetic_acceptance takes drafts whatever a grammar says; leave one of the two out",
        ),
        engine_config=engine,
        device=Device(frame, run_ahead=engine.run_ahead, graphs=graphs),
        resolved=resolved, notes=notes,
    )  # fmt: skip


def _tree(config: LLMConfig, head: Head | None) -> TreeShape | None:
    """The shape that draft_tree names. Raises ConfigError for a drafter that grows no trees."""
    if config.draft_tree is None:
        return None
    shape = TreeShape.of(config.draft_tree)
    if not callable(config.draft):
        if head is None or head.tree is None:
            kind = head.drafter.__name__ if head is not None else "not a head"
            raise ConfigError(
                f"draft_tree={config.draft_tree!r} needs an EAGLE-3 or MTP head; draft={config.draft!r} ({kind}) "
                "drafts chains"
            )
        vocab = head.model.vocab_size if head.model.id_D is None else head.model.id_D.shape[0]
        if shape.topk > vocab:
            raise ConfigError(f"draft_tree topk={shape.topk} is above the draft's vocabulary of {vocab} tokens")
    synthetic = config.synthetic_acceptance
    if synthetic is not None and not 1.0 <= synthetic <= shape.depth + 1:
        raise ConfigError(
            f"synthetic_acceptance={synthetic} must be from 1 to {shape.depth + 1}, the levels of the tree and one more"
        )
    return shape


def _check_confidence(config: LLMConfig, head: Head | None) -> None:
    """Raises ConfigError for a draft that cannot schedule verification; a factory's is looked at once it is made."""
    if (
        config.confidence_schedule
        and not callable(config.draft)
        and getattr(head and head.model, "confidence", None) is None
    ):
        kind = "a language model" if head is None else f"{head.drafter.__name__} without one"
        raise ConfigError(
            f"confidence_schedule=True needs a draft with a confidence head (DSpark); draft={config.draft!r} is {kind}"
        )


def _cost_key(
    loaded: LoadedModel, head: Head | None, drafter: Drafter | None, engine: EngineConfig, device: torch.device
) -> dict[str, Any]:
    """What the costs of frames depend on."""
    model = loaded.model
    return {
        "slipstream": __version__, "torch": torch.__version__, "device": costs.device_name(device),
        "model": repr(model.config), "dtype": str(model.dtype), "weights": loaded.weights,
        "draft": type(drafter).__name__ if head is None else repr(getattr(head.model, "block", head.model.config)),
        "draft_weights": _weights_of(head, None),
        "num_drafts": engine.num_drafts, "page_size": engine.page_size, "max_model_len": engine.max_model_len,
        "slot_buckets": engine.slot_buckets, "row_tiers": engine.row_tiers, "max_slots": engine.max_slots,
    }  # fmt: skip


def _weights_of(head: Head | None, draft: LoadedModel | None) -> str | None:
    """How a draft's weights are kept; None for a draft without any."""
    if draft is not None:
        return draft.weights
    if head is None:
        return None
    return "rounded to 8 bits" if getattr(head.model, "rounded", False) else str(head.model.dtype)[6:]


def _lookahead(num_drafts: int, shape: TreeShape | None) -> int:
    """Positions that a drafter's own KV needs beyond the verified rows: a tree's nodes stand behind the bonus token."""
    return num_drafts if shape is None else 1 + shape.expanded


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but this machine has no usable GPU; use device=cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _load(config: LLMConfig, source: str | None, device: torch.device) -> LoadedModel:
    return load_model(
        source, dtype=config.dtype, device=str(device), load_format=config.load_format,
        revision=config.revision, seed=config.seed, memory_bytes=_memory(config, device),
    )  # fmt: skip


def _tokenizer_source(config: LLMConfig, loaded: LoadedModel) -> Path | None:
    if config.tokenizer is not None:
        folder = Path(config.tokenizer)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"tokenizer={config.tokenizer!r} must be a folder with a tokenizer.json")
        return folder
    return loaded.gguf_path or loaded.tokenizer_dir


def _eos_ids(loaded: LoadedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*loaded.config.eos_ids, *tokenizer.eos_ids]))


def _check_draft(config: LLMConfig, target: LoadedModel, draft: LoadedModel, tokenizer: Tokenizer) -> None:
    ours, theirs = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"draft={config.draft!r} has a vocabulary of {theirs} tokens, the model {ours}; a draft needs the same one"
        )
    other = Tokenizer.from_path(_tokenizer_source(config, draft))
    if tokenizer.present and other.present and tokenizer.vocab != other.vocab:
        raise ConfigError(f"draft={config.draft!r} has another vocabulary than the model: some tokens have other ids")


def _memory(config: LLMConfig, device: torch.device) -> int | None:
    """Bytes that may still be taken on a GPU: what is free, or what is left of gpu_memory_mib. None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    if config.gpu_memory_mib is not None:
        free = min(free, int(config.gpu_memory_mib * 2**20) - torch.cuda.memory_allocated(device))
    return max(0, free)


def _kv_budget(config: LLMConfig, device: torch.device) -> int:
    """Bytes for pages when the user names no number: most of what is free on a GPU, a quarter of RAM on a CPU."""
    free = _memory(config, device)
    if free is not None:
        return int(free * 0.85)
    try:
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (ValueError, OSError, AttributeError):
        return 2 << 30


def _pages(
    model: Any, engine: EngineConfig, device: torch.device, *, layers: int | None = None, pages: int | None = None
) -> KVPages:
    """Of all layers of a model, or of so many; num_pages of the engine, or so many."""
    c = model.config
    return KVPages(
        num_layers=len(c.kv_layers) if layers is None else layers,
        num_pages=engine.num_pages if pages is None else pages, page_size=engine.page_size,
        num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=model.dtype, device=device,
    )  # fmt: skip


def _token_bytes(model: Any, layers: int) -> int:
    c = model.config
    return KVPages.bytes_for(layers, 1, 1, c.num_kv_heads, c.head_dim, model.dtype)


def _check_windows(model: Any, tree: TreeShape | None) -> None:
    window = model.config.window
    if window and tree is not None and tree.depth >= window:
        raise ConfigError(
            f"draft_tree with {tree.depth} levels and a sliding window of {window} tokens: a node has to see its "
            f"ancestors; use fewer levels than {window}"
        )


def _window_report(model: Any, engine: EngineConfig, layers: int) -> dict[str, Any] | None:
    """What the layers with a sliding window keep, beside what they would without one; for start-up and /server_info.

    slot: of one sequence of max_model_len at most; share: slot_bytes / slot_bytes_without.
    """
    if not layers:
        return None
    page = _token_bytes(model, layers) * engine.page_size
    slot, whole = engine.window_quota, -(-engine.max_model_len // engine.page_size)
    return {
        "window": engine.window, "layers": layers, "pages": engine.window_pages, "bytes": engine.window_pages * page,
        "bytes_without": engine.num_pages * page, "slot_pages": slot, "slot_bytes": slot * page,
        "slot_bytes_without": whole * page, "share": round(slot / whole, 6),
    }  # fmt: skip


def _recurrent(model: Any, draft: LoadedModel | None, tree: TreeShape | None) -> StateShape | None:
    """Sizes of the target's recurrent layers, None without any. UnsupportedError for what does not go with them."""
    if draft is not None and draft.config.delta_layers:
        raise UnsupportedError(
            f"draft: {draft.config.architecture} has recurrent layers, which a draft model must not have"
        )
    c = model.config
    if not c.delta_layers:
        return None
    if tree is not None:
        raise UnsupportedError(
            f"draft_tree with {c.architecture}: recurrent layers have one state per sequence, each branch of a "
            f"tree would need its own; leave draft_tree out, drafts are then a chain"
        )
    return state_shape(c)


def _states(shape: StateShape, state: SlotState, engine: EngineConfig, model: Any) -> StatePool:
    return StatePool(
        shape, max_slots=engine.max_slots, saved=engine.saved_states, rows=engine.num_drafts + 1,
        absorbed_S=state.absorbed_S, saved_SC=state.saved_SC, interval=engine.state_interval, early=engine.rereads,
        dtype=model.dtype, device=state.device,
    )  # fmt: skip


def _catch_up(drafter: Drafter | None, state: SlotState, engine: EngineConfig, model: Any) -> CatchUp | None:
    if drafter is None or not engine.catch_up:
        return None
    return CatchUp(
        drafter, state, ring=engine.catch_up, page_size=engine.page_size, hidden_size=model.config.hidden_size,
        dtype=model.dtype,
    )  # fmt: skip


def _workspace(
    device: torch.device, engine: EngineConfig, shape: TreeShape | None, models: list[Any]
) -> Workspace | None:
    """On a GPU: the kernels' scratch. The target's and the drafter's passes share it: they are on one stream."""
    if device.type != "cuda":
        return None
    from slipstream.kernels.workspace import Workspace

    return Workspace.for_frames(
        device, slots=max(engine.max_slots, *engine.slot_buckets, 1),
        rows=max(engine.num_drafts + 1, 0 if shape is None else shape.topk),
        shapes=[(m.config.num_heads, m.config.num_kv_heads, m.config.head_dim) for m in models],
    )  # fmt: skip


def _fused(model: Any, kv: KVPages, workspace: Workspace | None) -> Any:
    """On a GPU: the target's pass as fused kernels where they fit it."""
    if workspace is None:
        return None
    from slipstream.models.fused import FusedDecoder
    from slipstream.models.fused_hybrid import FusedHybrid

    made = [kind(model, kv, workspace, pdl=True) for kind in (FusedDecoder, FusedHybrid) if kind.fits(model)]
    return made[0] if made else None


def _graphs(
    config: LLMConfig,
    frame: Frame,
    engine: EngineConfig,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> Any:
    """On a GPU: every frame and prefill chunk captured, unless cuda_graphs is off. ConfigError beyond the budget."""
    if device.type != "cuda" or not config.cuda_graphs:
        return None
    from slipstream.device.graphs import FrameGraphs

    graphs = FrameGraphs(
        frame, buckets=engine.slot_buckets, kinds=engine.frame_kinds,
        len_ub=engine.max_model_len + engine.num_drafts + 1, chunks=engine.prefill_tiers,
        prompts=engine.prefill_prompts, width=engine.num_drafts + 1 if engine.confidence_schedule else None,
    )  # fmt: skip
    given = {"budget_seconds": config.capture_seconds, "budget_mib": config.capture_mib}
    budget = {name: float(value) for name, value in given.items() if value is not None}
    graphs.report = graphs.capture(**budget, progress=progress)
    return graphs


def _capture_note(report: Any) -> list[str]:
    if report is None:
        return []
    return [f"captured {report.graphs} frame graphs in {report.seconds:.1f} s, {report.mib:.0f} MiB"]
