"""Frozen configuration, one dataclass per component. `resolve` decides everything before anything is built."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from slipstream.errors import ConfigError
from slipstream.types import MAX_DRAFTS, MAX_STOP_IDS, MAX_TREE_NODES

DTYPES = ("auto", "float32", "float64", "bfloat16")
DEFAULT_DRAFTS = 3
"""Drafts per frame and slot when a drafter is named: with the bonus token four rows, before the CPU's cost cliff."""
PREFILL_TIERS = (128, 512, 2048)
"""Prompt rows of the captured prefill passes on a GPU."""
STATE_INTERVAL = 256
"""About how many tokens stand between two saved states of recurrent layers."""
STATE_UNIT = 16
"""A state interval is a multiple of this: prompts are read in tiles of so many tokens."""
KV_TOKENS = (1 << 18, 1 << 15)  # most that pages are taken for unasked, on a GPU and on a CPU
CATCH_UP = 32
"""Positions per slot that a drafter with a cache of its own catches up on in one pass, where drafting may be off."""
STOCK_PAGES = 4
"""Pages that a slot gets ahead of need while there is plenty: page tables are then rarely written."""
PREFILL_PROMPTS = 16
"""Prompts that one captured prefill pass can read from, and so end: each costs a row of the output head."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The host's half: slots, pages, chunks.

    max_slots: running requests (slot 0 is the sink, ids are 1..max_slots). num_pages: page ids 1..num_pages, page 0 is
    the sink. prefill_chunk: most prompt rows per launch while nobody decodes; prefill_chunk_busy: the same while
    somebody does, or prefill_busy_share times the rows of the frame if that is more. prefill_tiers: packed rows that a
    chunk may have; empty means exact. prefill_prompts: most prompts that one chunk reads from, 0 means any number.
    lookahead: positions beyond the verified rows that the drafter's own KV needs. rereads: positions before the end of
    a prefix hit that are read again, for drafters that need what the target computes there. tree_depth: levels of a
    draft tree of num_drafts nodes below its root, so that a frame emits at most tree_depth + 1 tokens per slot; 0:
    drafts are a chain. row_tiers: rows per slot that a frame may have; empty means exact. adaptive: a cost model
    chooses each frame's drafts, from `draft_modes`. frame_seconds: (padded slots, rows per slot, drafts made, seconds)
    of captured frames; empty: frames say themselves how long they took, and mode_seconds, (slots, drafts, seconds), is
    where they begin. draft_acceptance: what the draft was found to have, by position. confidence_schedule: rows of a
    frame follow from the drafts' confidences and from row_seconds: (slots, rows, seconds) of timed frames. late_counts:
    how many drafts a round offers depends on which they are, so a frame that judges them must not have its rows from
    that. grammar_drafts: masks bring drafts too, where a grammar leaves one token only. draft_laws: drafts of unseeded
    requests are drawn. catch_up: committed positions that a drafter with a cache of its own may lag behind, 0: none, so
    that all frames have to draft. max_stop_ids: stop token ids of a request, those that end a sequence for the model
    included. window: positions that rows of layers with a sliding window see, 0 without such layers; window_pages: page
    ids of those layers are 1..window_pages. saved_states: states of recurrent layers that are kept, running requests'
    and the prefix cache's, one every state_interval tokens; 0 without such layers.
    """

    max_slots: int = 16
    page_size: int = 32
    num_pages: int = 512
    max_model_len: int = 2048
    run_ahead: int = 1
    num_drafts: int = 0
    lookahead: int = 0
    rereads: int = 0
    tree_depth: int = 0
    prefill_chunk: int = 256
    prefill_chunk_busy: int = 32
    prefill_busy_share: int = 0
    prefill_tiers: tuple[int, ...] = ()
    prefill_prompts: int = 0
    prefix_cache: bool = True
    slot_buckets: tuple[int, ...] = ()
    row_tiers: tuple[int, ...] = ()
    adaptive: bool = False
    frame_seconds: tuple[tuple[int, int, int, float], ...] = ()
    mode_seconds: tuple[tuple[int, int, float], ...] = ()
    draft_acceptance: tuple[float, ...] = ()
    confidence_schedule: bool = False
    grammar_drafts: bool = False
    draft_laws: bool = False
    row_seconds: tuple[tuple[int, int, float], ...] = ()
    late_counts: bool = False
    catch_up: int = 0
    window: int = 0
    window_pages: int = 0
    saved_states: int = 0
    state_interval: int = 0
    max_waiting: int = 100_000
    max_stop_ids: int = MAX_STOP_IDS

    def __post_init__(self) -> None:
        _between("max_slots", self.max_slots, 1, 4096)
        _between("page_size", self.page_size, 1, 1024)
        _between("num_pages", self.num_pages, 1, 2**31 - 1)
        _between("max_model_len", self.max_model_len, 2, 2**24)
        _between("run_ahead", self.run_ahead, 1, 64)
        most_rows = MAX_TREE_NODES if self.tree_depth else MAX_DRAFTS + 1
        _between("num_drafts", self.num_drafts, 0, most_rows - 1)
        _between("tree_depth", self.tree_depth, 0, self.num_drafts)
        _between("max_stop_ids", self.max_stop_ids, 1, 1024)
        _between("prefill_chunk", self.prefill_chunk, 1, 1 << 16)
        _between("prefill_chunk_busy", self.prefill_chunk_busy, 1, 1 << 16)
        _between("prefill_busy_share", self.prefill_busy_share, 0, 64)
        _between("prefill_prompts", self.prefill_prompts, 0, 4096)
        for tier in self.prefill_tiers:
            _between("prefill_tiers", tier, 1, 1 << 16)
        for bucket in self.slot_buckets:
            _between("slot_buckets", bucket, 1, 4096)
        for tier in self.row_tiers:
            _between("row_tiers", tier, 1, most_rows)
        if self.slot_buckets and max(self.slot_buckets) < self.max_slots:
            raise ConfigError(
                f"slot_buckets={list(self.slot_buckets)} do not reach max_slots={self.max_slots}; add that size"
            )
        if self.row_tiers and max(self.row_tiers) < self.num_drafts + 1:
            raise ConfigError(
                f"row_tiers={list(self.row_tiers)} do not reach num_drafts + 1 = {self.num_drafts + 1} rows per slot"
            )
        widest = max(self.prefill_chunk, self.prefill_chunk_busy)
        if self.prefill_tiers and max(self.prefill_tiers) < widest:
            raise ConfigError(
                f"prefill_tiers={list(self.prefill_tiers)} do not reach prefill_chunk={widest} rows; add that size or "
                "lower prefill_chunk"
            )
        _between("saved_states", self.saved_states, 0, 1 << 16)
        unit = math.lcm(self.page_size, STATE_UNIT)
        if self.saved_states and (self.state_interval % unit or self.state_interval < max(1, self.num_drafts + 2)):
            raise ConfigError(
                f"state_interval={self.state_interval} must be a multiple of {unit} (page_size={self.page_size} and "
                f"{STATE_UNIT}) and above num_drafts + 1 = {self.num_drafts + 1}"
            )
        _between("window", self.window, 0, 2**31 - 1)
        if self.window and self.window_pages < self.window_need:
            raise ConfigError(
                f"window_pages={self.window_pages} is below the {self.window_need} that windows of {self.window} "
                f"tokens need: {self.window_quota} for each of max_slots={self.max_slots}, or as many as num_pages="
                f"{self.num_pages}"
            )
        one = self.pages_per_slot
        if self.num_pages < one:
            raise ConfigError(
                f"num_pages={self.num_pages} of {self.page_size} tokens cannot hold one sequence of "
                f"max_model_len={self.max_model_len} (needs {one}); raise num_pages or lower max_model_len"
            )

    @property
    def draft_modes(self) -> tuple[int, ...]:
        """Numbers of drafts that `adaptive` chooses from: those that fill a row tier, or few and about doubling."""
        if self.row_tiers:
            modes = {tier - 1 for tier in self.row_tiers}
        else:
            modes = {2**i - 1 for i in range(1, 6)} | {2}
        return tuple(sorted({0, self.num_drafts} | {k for k in modes if k < self.num_drafts}))

    @property
    def frame_kinds(self) -> list[tuple[int, int]]:
        """(rows per slot, drafts made) of the frames that plans may ask for, with `row_tiers`."""
        kinds = set[tuple[int, int]]()
        for k in self.draft_modes if self.adaptive else (self.num_drafts,):
            most = min(tier for tier in self.row_tiers if tier > k)
            kinds |= {(tier, k) for tier in self.row_tiers if tier <= most}
        if self.num_drafts and (self.catch_up or not self.lookahead):
            kinds.add((min(self.row_tiers), 0))
        return sorted(kinds)

    @property
    def saved_places(self) -> int:
        """Width of the table of saved states, by tokens // state_interval."""
        return self.pages_per_slot * self.page_size // self.state_interval + 2 if self.saved_states else 1

    @property
    def window_quota(self) -> int:
        """Most pages that a slot holds for layers with a window: the window, and a prompt chunk or the rows ahead.

        A last page that begins within a chunk is one of the chunk's, because chunks keep to the quota.
        """
        chunk, page = max(self.prefill_chunk, self.prefill_chunk_busy), self.page_size
        ahead = (self.run_ahead + 2) * (self.num_drafts + 1) + self.lookahead + STOCK_PAGES * page
        return min(max(-(-(self.window + chunk) // page), -(-(self.window + ahead) // page) + 1), self.pages_per_slot)

    @property
    def window_need(self) -> int:
        """Window pages that are always enough: every slot's quota, or one for every page of the other layers."""
        return min(self.num_pages, self.max_slots * self.window_quota)

    @property
    def pages_per_slot(self) -> int:
        """Width of the page table: pages for max_model_len plus one frame's rows, the drafter's or the target's."""
        return -(-(self.max_model_len + max(self.num_drafts, self.lookahead) + 1) // self.page_size)


def _between(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be a whole number from {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """What a user may say about a model and its engine; None or "auto" is decided by `build`.

    draft may also be a Drafter factory (tests and benchmarks): called with slots, max_drafts, max_len, device, and
    with draft_tree its shape. draft_options go to the drafter (n-gram: min_n, max_n, gate; suffix: depth, factor,
    offset, min_prob). draft_tree: dict(topk=, levels=, total=), a tree instead of a chain of drafts (draft/tree.py); it
    sets the number of drafts, total - 1. draft_weights: "auto" rounds an EAGLE-3 head to 8 bits where the target's
    weights are packed so (GGUF on a CPU), which costs no exactness; "dense" keeps it. synthetic_acceptance: mean tokens
    per round, overrides only the accept decision. capture_seconds, capture_mib: what capturing frames may take.
    window_pages: pages for layers with a sliding window; by default what is always enough, more keep more prefixes.
    saved_states: states of recurrent layers that are kept for prefix hits, a tenth of the memory for pages by default;
    state_interval: tokens between two of them, a multiple of page_size and 16.
    prompt_embeds: whether prompts may bring embeddings, which takes room for a chunk of them; by default where the
    model has image tokens, and on a CPU.
    gpu_memory_mib: most that weights and pages may take on a GPU, even where more is free.
    adaptive: every frame makes the number of drafts, none included, that pays at its batch size and the acceptance
    seen so far; num_drafts is then the most. Nothing but this promises never to be slower than plain decoding: a fixed
    number is worth it or not by batch size and text (on a CPU the fifth row of a frame costs several times the second).
    It is off unless asked for, with a drafter named too: a number of drafts then means what it says, frames are the
    same from run to run, where on a CPU the choice follows measured times, and n-gram drafts have a gate of their own.
    confidence_schedule: every frame verifies as many drafts as pay, the likeliest of all requests by the confidences of
    a DSpark draft; all of them while rows cost nothing. Frames are timed for it at start-up.
    processors: custom logits processors (sampling/custom.py), names of entry points or functions by name.
    verifier: how drafts that were sampled are judged in unseeded requests, "chain"
    or "block" (which accepts at least as much); both keep the target's law.
    """

    model: str | None = None
    draft: Any = None
    num_drafts: int | None = None
    draft_tree: dict[str, int] | None = None
    draft_weights: str = "auto"
    draft_options: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    revision: str | None = None
    tokenizer: str | None = None
    seed: int = 0
    threads: int | None = None
    run_ahead: int | None = None
    max_model_len: int | None = None
    max_slots: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    window_pages: int | None = None
    saved_states: int | None = None
    state_interval: int | None = None
    prefill_chunk: int | None = None
    prefill_chunk_busy: int | None = None
    prefill_tiers: tuple[int, ...] = ()
    prefix_cache: bool = True
    slot_buckets: tuple[int, ...] = ()
    row_tiers: tuple[int, ...] = ()
    cuda_graphs: bool = True
    capture_seconds: float | None = None
    capture_mib: float | None = None
    gpu_memory_mib: float | None = None
    synthetic_acceptance: float | None = None
    prompt_embeds: bool | None = None
    adaptive: bool = False
    confidence_schedule: bool = False
    verifier: str = "chain"
    processors: Any = ()

    @classmethod
    def from_options(cls, **options: Any) -> LLMConfig:
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known: {', '.join(known)}")
        return cls(**options)

    @property
    def drafts(self) -> int:
        """Drafts per frame and slot, where the draft itself does not say how many it makes."""
        if self.draft in (None, "none"):
            return 0
        return DEFAULT_DRAFTS if self.num_drafts is None else self.num_drafts

    def __post_init__(self) -> None:
        self._check_types()
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} must be auto, cpu or cuda")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format={self.load_format!r} must be auto or dummy")
        if self.draft_weights not in ("auto", "dense"):
            raise ConfigError(f"draft_weights={self.draft_weights!r} must be auto or dense")
        if self.verifier not in ("chain", "block"):
            raise ConfigError(f"verifier={self.verifier!r} must be chain or block")
        if self.num_drafts is not None:
            _between("num_drafts", self.num_drafts, 0, MAX_DRAFTS)
        if self.threads is not None:
            _between("threads", self.threads, 1, 1024)
        for name in ("capture_seconds", "capture_mib", "gpu_memory_mib"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not 0 < value < float("inf")):
                raise ConfigError(f"{name}={value!r} must be a number above 0")
        if self.num_drafts == 0 and self.draft not in (None, "none"):
            raise ConfigError(f"num_drafts=0 leaves draft={self.draft!r} nothing to do; leave one of the two out")
        for name in ("prefill_chunk", "prefill_chunk_busy"):
            if (rows := getattr(self, name)) is not None:
                _between(name, rows, 1, 1 << 16)
        if self.adaptive and self.draft in (None, "none"):
            raise ConfigError('adaptive=True chooses how much to draft; it needs a draft, such as draft="ngram"')
        if self.adaptive and self.draft_tree is not None:
            raise ConfigError("adaptive=True chooses among chains; it does not go with draft_tree yet, leave one out")
        if self.confidence_schedule:
            if self.draft in (None, "none", "ngram", "suffix"):
                raise ConfigError(
                    f"confidence_schedule=True needs a draft with a confidence head (DSpark), not draft={self.draft!r}"
                )
            if self.draft_tree is not None:
                raise ConfigError("confidence_schedule=True schedules chains; leave it or draft_tree out")
            if self.adaptive:
                raise ConfigError(
                    "confidence_schedule=True and adaptive=True both decide how much is verified, by each draft's own "
                    "confidence or by the mean acceptance of all; leave one out"
                )
        if self.draft is None and self.num_drafts:
            raise ConfigError(f'num_drafts={self.num_drafts} needs a draft; give draft="ngram" or a draft model')
        if self.draft_tree is not None:
            if self.draft is None or self.draft == "none":
                raise ConfigError(f"draft_tree={self.draft_tree!r} needs a draft: an EAGLE-3 or MTP head")
            if self.num_drafts is not None:
                raise ConfigError(
                    f"num_drafts={self.num_drafts} and draft_tree={self.draft_tree!r}: a tree has total - 1 drafts, "
                    "leave num_drafts out"
                )
            if self.verifier == "block":
                raise ConfigError("verifier='block' judges chains only; leave it or draft_tree out")
        if self.synthetic_acceptance is not None and self.draft_tree is None:
            drafts = DEFAULT_DRAFTS if self.num_drafts is None else self.num_drafts
            if self.draft is None:
                raise ConfigError('synthetic_acceptance needs a draft; give draft="ngram" or a draft model')
            if not 1.0 <= self.synthetic_acceptance <= drafts + 1:
                raise ConfigError(
                    f"synthetic_acceptance={self.synthetic_acceptance} must be from 1 to num_drafts + 1 = {drafts + 1}"
                )

    def _check_types(self) -> None:
        """What comes from a config file or an environment is often text where a number is meant."""
        for kinds, what, names in _KINDS:
            for name in names:
                value, default = getattr(self, name), getattr(type(self), name, None)
                if value is default is None:
                    continue
                if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                    raise ConfigError(f"{name}={value!r} must be {what}, not {type(value).__name__}")
        for name in ("slot_buckets", "row_tiers"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)) or not all(type(n) is int for n in value):
                raise ConfigError(f"{name}={value!r} must be a list of whole numbers")


_KINDS: tuple[tuple[tuple[type, ...], str, tuple[str, ...]], ...] = (
    (
        (int,), "a whole number",
        ("num_drafts", "seed", "threads", "run_ahead", "max_model_len", "max_slots", "page_size", "num_pages",
         "window_pages", "saved_states", "state_interval", "prefill_chunk"),
    ),
    ((int, float), "a number", ("synthetic_acceptance",)),
    ((str, os.PathLike), "text or a path", ("model", "tokenizer")),
    ((str,), "text", ("device", "dtype", "draft_weights", "load_format", "revision")),
    ((bool,), "True or False", ("prefix_cache", "cuda_graphs", "adaptive", "confidence_schedule", "prompt_embeds")),
    ((Mapping,), "a mapping of option names to values", ("draft_options", "draft_tree")),
)  # fmt: skip


def resolve_engine(
    user: LLMConfig,
    *,
    context: int,
    num_drafts: int,
    lookahead: int,
    rereads: int = 0,
    tree_depth: int = 0,
    eos_ids: int = 0,
    kv_bytes_per_token: int,
    memory_bytes: int,
    on_cpu: bool,
    slot_bytes: int = 0,
    state_bytes: int = 0,
    window: int = 0,
    window_bytes_per_token: int = 0,
) -> EngineConfig:
    """Every engine number, from what the user said, the model's context and the memory there is for KV.

    context: the model's longest sequence. eos_ids: how many tokens end a sequence for the model. memory_bytes: what
    may be spent on pages when num_pages is not given, less slot_bytes for every slot. window_bytes_per_token: of layers
    with a window of that many tokens, which kv_bytes_per_token leaves out. state_bytes: of one saved state of recurrent
    layers, 0 without such layers.
    """
    max_model_len = context if user.max_model_len is None else user.max_model_len
    if max_model_len > context:
        raise ConfigError(f"max_model_len={max_model_len} is above the model's context of {context}")
    max_slots = user.max_slots if user.max_slots is not None else (16 if on_cpu else 64)
    page_size = user.page_size if user.page_size is not None else 32
    _between("page_size", page_size, 1, 1024)
    _between("max_slots", max_slots, 1, 4096)
    states = slot_bytes * (max_slots + 1)
    if states >= memory_bytes and slot_bytes and not on_cpu:
        raise ConfigError(
            f"states of recurrent layers take {slot_bytes / 2**20:.1f} MiB for each of max_slots={max_slots} slots and "
            f"the sink, and {max(0, memory_bytes) / 2**20:.1f} MiB are left: lower max_slots"
        )
    memory_bytes -= states
    saved, interval = _saved_states(user, page_size, max_slots, max_model_len, num_drafts, memory_bytes, state_bytes)
    memory_bytes -= saved * state_bytes
    buckets = tuple(user.slot_buckets)
    tiers = tuple(sorted({min(t, num_drafts + 1) for t in user.row_tiers}))
    if not on_cpu:  # captured frames need fixed shapes
        powers = {2**i for i in range(max_slots.bit_length())}
        buckets = buckets or tuple(sorted(powers | {max_slots}))
        fine = user.adaptive or user.confidence_schedule
        some = {2**i for i in range(num_drafts.bit_length())} if fine else {1}
        tiers = tiers or tuple(sorted(some | {num_drafts + 1}))
    chunk = user.prefill_chunk if user.prefill_chunk is not None else (256 if on_cpu else 2048)
    busy = user.prefill_chunk_busy
    chunk_tiers = tuple(user.prefill_tiers)
    if not on_cpu:
        chunk_tiers = chunk_tiers or (*PREFILL_TIERS, chunk)
        chunk_tiers = tuple(sorted({min(t, chunk) for t in chunk_tiers}))
        # Until chunks and frames have been timed (device/graphs.py), the smallest chunk is the careful choice.
        busy = busy if busy is not None else chunk_tiers[0]
    reach = max(num_drafts, lookahead) + 1
    one = -(-(max_model_len + 2 * reach) // page_size)
    made = EngineConfig(
        max_slots=max_slots,
        page_size=page_size,
        num_pages=2**31 - 1 if user.num_pages is None else user.num_pages,
        max_model_len=max_model_len,
        run_ahead=user.run_ahead if user.run_ahead is not None else (1 if on_cpu else 2),
        num_drafts=num_drafts,
        lookahead=lookahead,
        rereads=rereads,
        tree_depth=tree_depth,
        prefill_chunk=chunk,
        prefill_chunk_busy=min(chunk, busy if busy is not None else 32),
        # A CPU's time goes with the rows: a chunk of twice the frame's is at most two frames' time.
        prefill_busy_share=2 if on_cpu and busy is None else 0,
        prefill_tiers=chunk_tiers,
        prefill_prompts=0 if on_cpu else min(max_slots, PREFILL_PROMPTS),
        prefix_cache=user.prefix_cache and (saved > 0 or not state_bytes),
        saved_states=saved,
        state_interval=interval,
        slot_buckets=buckets,
        row_tiers=tiers,
        adaptive=user.adaptive and num_drafts > 0,
        confidence_schedule=user.confidence_schedule and num_drafts > 0,
        catch_up=max(CATCH_UP, 2 * (num_drafts + 1)) if user.adaptive and lookahead else 0,
        max_stop_ids=max(MAX_STOP_IDS, eos_ids + MAX_STOP_IDS // 2),
        window=window,
        window_pages=2**31 - 1,
    )
    if user.num_pages is None:
        wanted = min(max_slots * one, max(one, KV_TOKENS[on_cpu] // page_size))
        fitting = _fitting(made, memory_bytes, kv_bytes_per_token * page_size, window_bytes_per_token * page_size)
        if fitting < one and not on_cpu:
            raise ConfigError(
                f"the GPU memory left for KV pages, {max(0, memory_bytes) / 2**20:.1f} MiB, holds {max(0, fitting)} "
                f"pages of {page_size} tokens ({kv_bytes_per_token * page_size / 2**20:.3f} MiB each); one sequence of "
                f"max_model_len={max_model_len} needs {one}: lower max_model_len, or give more memory"
            )
        made = replace(made, num_pages=max(one, min(wanted, fitting)))
    need = made.window_need if window else 0
    return replace(made, window_pages=need if user.window_pages is None else user.window_pages)


def _saved_states(
    user: LLMConfig, page_size: int, max_slots: int, max_len: int, num_drafts: int, memory_bytes: int, state_bytes: int
) -> tuple[int, int]:
    """How many states of recurrent layers are kept for the prefix cache, and how many tokens apart."""
    if not state_bytes:
        for name in ("saved_states", "state_interval"):
            if value := getattr(user, name):
                raise ConfigError(f"{name}={value} is for models with recurrent layers; this one has none")
        return 0, 0
    if user.saved_states and not user.prefix_cache:
        raise ConfigError(
            f"saved_states={user.saved_states} are the prefix cache's; leave it or prefix_cache=False out"
        )
    if user.saved_states == 0 and user.state_interval is not None:
        raise ConfigError(f"state_interval={user.state_interval} with saved_states=0: nothing is saved, leave one out")
    if not user.prefix_cache or user.saved_states == 0:
        return 0, 0
    unit = math.lcm(page_size, STATE_UNIT)
    near = max(num_drafts + 2, min(STATE_INTERVAL, max_len // 8))
    interval = user.state_interval if user.state_interval is not None else -(-near // unit) * unit
    fitting = max(0, memory_bytes) // 10 // state_bytes
    return min(4 * max_slots, fitting) if user.saved_states is None else user.saved_states, interval


def _fitting(engine: EngineConfig, memory_bytes: int, page: int, window_page: int) -> int:
    """How many pages there is memory for: page bytes each, and window_page more for each window page they need."""
    both = memory_bytes // (page + window_page)
    quotas = engine.max_slots * engine.window_quota if window_page else 0
    if not window_page or both <= quotas:
        return both
    rest = memory_bytes - quotas * window_page
    return rest // page if page else 2**31 - 1
