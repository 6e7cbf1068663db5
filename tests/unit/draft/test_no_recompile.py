"""Drafting has one form for every round: traced at start-up, it is never traced again (founding case 3).

The whole drafting stage as it runs on a GPU, its kernels as ops, goes through torch's tracer: batch 1 to 64, hidden
states there or not, without a graph break. Tracing twice would mean that something outside the tensors steers it: a
step number, a list that grows, a value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from slipstream.draft.checkpoint import TensorTable
from slipstream.draft.eagle3 import Eagle3Drafter
from slipstream.draft.eagle3_config import parse_eagle3
from slipstream.draft.eagle3_model import Eagle3Model, draft_ids
from slipstream.draft.feature import FeatureDrafter
from slipstream.draft.feature_tree import FeatureTreeDrafter
from slipstream.draft.mtp import MTPDrafter
from slipstream.draft.mtp_model import MTPModel, mtp_shapes, parse_mtp
from slipstream.draft.protocol import Drafts, DraftView, TargetRows
from slipstream.draft.tree import TreeShape
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.dummy import DummyTensors, DummyWeights
from slipstream.models.qwen3 import Qwen3
from slipstream.models.weights import WeightBuilder
from tests.support.eagle import head_tensors, head_values, stand_in_target
from tests.support.tiny import tiny_config

H, V, SLOTS, WIDTH, PAGES = 32, 40, 64, 3, 2
START_UP = (1, 2, 45)
"""One slot, several, and so many that the head's passes, of three rows a slot, take the library."""


@pytest.fixture(autouse=True)
def no_trace_log() -> Iterator[None]:
    """The tracer writes a long log at level DEBUG, which pytest would keep."""
    log = logging.getLogger("torch.__trace")
    before, log.propagate = log.propagate, False
    yield
    log.propagate = before


def make_mtp() -> FeatureDrafter:
    """A prediction head of a model that is as large as the stand-in."""
    c = tiny_config("qwen3", vocab_size=V, hidden_size=H)
    weights = WeightBuilder(DummyWeights(c, seed=0, device=torch.device("cpu")), device=torch.device("cpu"),
                            dtype=torch.float32)  # fmt: skip
    config = parse_mtp({}, c)
    head = MTPModel(config, DummyTensors(mtp_shapes(config), seed=1, device=torch.device("cpu")), Qwen3(c, weights))
    kv = KVPages(
        num_layers=1, num_pages=SLOTS * PAGES, page_size=16, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
        dtype=head.dtype, device=head.device,
    )  # fmt: skip
    return MTPDrafter(head, kv=kv, max_drafts=2, max_len=20, workspace=Workspace("cpu", floats=1 << 16))


def make(kind: str, levels: int = 3) -> FeatureDrafter:
    if kind == "mtp":
        return make_mtp()
    target = stand_in_target(hidden=H, vocab=V, layers=4)
    config = parse_eagle3(head_values(hidden=H, vocab=V, draft_vocab=24), target.config)
    table = TensorTable(head_tensors(hidden=H, vocab=V, draft_vocab=24, own_embedding=True))
    head = Eagle3Model(config, table, target, draft_ids(table, config, target.device))
    c = head.config
    kv = KVPages(
        num_layers=c.num_layers, num_pages=SLOTS * PAGES, page_size=16, num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim, dtype=head.dtype, device=head.device,
    )  # fmt: skip
    options: dict[str, Any] = {"kv": kv, "max_len": 20, "workspace": Workspace("cpu", floats=1 << 16)}
    if kind == "chain":
        return Eagle3Drafter(head, max_drafts=2, **options)
    return FeatureTreeDrafter(head, shape=TreeShape(topk=3, levels=levels, total=8), max_drafts=7, **options)


def round_of(slots: int, drafter: FeatureDrafter, hidden: bool) -> DraftView:
    """The end of a frame in which every slot committed WIDTH rows."""
    slot_B, index_R = torch.arange(1, slots + 1), torch.arange(slots * WIDTH)
    committed_S = torch.full((SLOTS + 1,), 6)
    committed_S[0] = 0
    table_SP = torch.arange(1, SLOTS * PAGES + 1).view(SLOTS, PAGES)
    rows = TargetRows(
        slot_R=slot_B.repeat_interleave(WIDTH), pos_R=index_R % WIDTH + 2, token_R=index_R % V,
        owner_R=index_R // WIDTH, slot_B=slot_B, rows_B=torch.full((slots,), WIDTH),
        row_of_BW=index_R.view(slots, WIDTH), taps=tuple(torch.randn(slots * WIDTH, H) for _ in drafter.taps),
        hidden_RH=torch.randn(slots * WIDTH, H) if hidden or drafter.reads_hidden else None,
    )  # fmt: skip
    count_B = torch.full((slots,), WIDTH)
    return DraftView(
        slot_B=slot_B, committed_B=committed_S[slot_B], drafted_B=count_B - 1, accepted_B=count_B - 1,
        emitted_B=count_B, rows=rows, history_SL=torch.arange((SLOTS + 1) * 40).view(SLOTS + 1, 40) % V,
        committed_S=committed_S, table_SP=torch.cat([torch.zeros(1, PAGES).long(), table_SP]), params=None, laws=None,
        len_ub=20, first_page=(), drafts=drafter.max_drafts, sampled=False, filtered=False, rejection=False,
        coupled=False,
    )  # fmt: skip


def traced_again(drafter: FeatureDrafter, batches: Sequence[int], start_up: Sequence[int] = START_UP) -> int:
    """Traces after start-up, over rounds of `batches` slots; every second round has hidden states."""
    import torch.fx.experimental._config
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    count = CompileCounter()

    def drafting(view: DraftView) -> Drafts:
        return drafter.propose(drafter.extend(view), view)

    traced = torch.compile(drafting, backend=count, dynamic=True, fullgraph=True)
    # Sizes that are equal by chance (45 slots, 45 of something else) are not the same size.
    apart = torch.fx.experimental._config.patch(use_duck_shape=False)
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=64), apart:
        for slots in start_up:
            traced(round_of(slots, drafter, False))
        known = count.frame_count
        assert 0 < known <= len(start_up)
        for i, slots in enumerate(batches):
            traced(round_of(slots, drafter, i % 2 == 1))
    return int(count.frame_count) - known


@pytest.mark.parametrize("kind", ["chain", "tree", pytest.param("mtp", marks=pytest.mark.slow)])
def test_no_round_is_traced_again(kind: str) -> None:
    assert traced_again(make(kind), range(1, SLOTS + 1)) == 0


def a_list_that_grows(drafter: FeatureTreeDrafter) -> None:
    """Founding case 3: KV lengths of every step in a list."""
    feed, lengths = drafter._feed, list[Any]()

    def slow(frontier: Any, view: DraftView) -> Any:
        lengths.append(view.committed_B + 1)
        return feed(frontier, view)

    drafter._feed = slow  # type: ignore[method-assign]


def a_branch_on_the_step(drafter: FeatureTreeDrafter) -> None:
    """Founding case 3: one function for the first and the later expansions, which asks how often it was called."""
    feed = drafter._feed
    steps = {"made": 0}

    def slow(frontier: Any, view: DraftView) -> Any:
        steps["made"] += 1
        if steps["made"] % 7 == 1:
            frontier = frontier._replace(seen_BK=frontier.seen_BK.clone())
        return feed(frontier, view)

    drafter._feed = slow  # type: ignore[method-assign]


def hidden_states_there_or_not(drafter: FeatureTreeDrafter) -> None:
    """Founding case 3: a step that looks whether there are hidden states."""
    extend = drafter.extend

    def slow(view: DraftView) -> Any:
        first = extend(view)
        return first if view.rows.hidden_RH is None else first.__class__(**{**first.__dict__, "q_BV": None})

    drafter.extend = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [a_list_that_grows, a_branch_on_the_step, hidden_states_there_or_not])
def test_the_original_form_is_seen(plant: Callable[[FeatureTreeDrafter], None]) -> None:
    drafter = make("tree", levels=2)
    assert isinstance(drafter, FeatureTreeDrafter)
    plant(drafter)
    assert traced_again(drafter, (3, 4), start_up=(2,)) > 0
