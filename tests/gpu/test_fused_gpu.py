"""The fused pass against the plain one on a GPU, for row counts on both sides of where products stop to stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.attention.kernel import KernelAttention
from slipstream.attention.paged import cache_slots
from slipstream.kernels.tuning import PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.decoder import Decoder
from slipstream.models.dummy import DummyWeights
from slipstream.models.fused import FusedDecoder, FusedOutput
from slipstream.models.registry import model_class
from slipstream.models.weights import WeightBuilder
from tests.support.kernel_cases import relative_error
from tests.support.tiny import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]

LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
PAGE, PAGES_PER_SLOT, TAPS = 16, 8, (2, 0)
CUTS = {
    "default": PassConfig(),
    "library": PassConfig(rope=0, residual=0, silu=0, head=0, library_pdl=True),
    "streamed": PassConfig(rope=128, residual=128, silu=128, head=128),
    "mixed": PassConfig(rope=0, residual=128, silu=0, head=128, library_pdl=True),
}
SHAPES = {
    "llama": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "qwen2": {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64},
    "qwen3": {"hidden_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
}


class Case:
    """A model, a cache of random history and rows: `per_slot` neighbours a slot, then padding up to `rows`."""

    def __init__(self, arch: str, dtype: torch.dtype, rows: int, per_slot: int) -> None:
        device = torch.device("cuda")
        config = tiny_config(arch, num_hidden_layers=3, intermediate_size=776, vocab_size=1000, **SHAPES[arch])
        weights = WeightBuilder(DummyWeights(config, seed=3, device=device), device=device, dtype=dtype)
        model = model_class(config.architecture)(config, weights)
        assert isinstance(model, Decoder)
        slots = (rows - 3) // per_slot
        self.model, self.per_slot = model, per_slot
        self.kv = KVPages(
            num_layers=3, num_pages=slots * PAGES_PER_SLOT, page_size=PAGE, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, dtype=dtype, device=device,
        )  # fmt: skip
        self.history = torch.randn_like(self.kv.data)
        self.table_SP = torch.zeros(slots + 1, PAGES_PER_SLOT, dtype=torch.int64, device=device)
        self.table_SP[1:] = (torch.randperm(slots * PAGES_PER_SLOT, device=device) + 1).view(slots, -1)
        length = torch.randint(1, PAGE * PAGES_PER_SLOT - per_slot, (slots,), device=device)
        pad = torch.zeros(rows - slots * per_slot, dtype=torch.int64, device=device)
        grid = torch.arange(per_slot, device=device)
        self.slot_R = torch.cat([torch.arange(1, slots + 1, device=device).repeat_interleave(per_slot), pad])
        self.pos_R = torch.cat([(length[:, None] + grid).flatten(), pad])
        self.token_R = torch.randint(0, 1000, (rows,), device=device)
        self.live = int(slots * per_slot)

    def fused(self, cut: str, *, pdl: bool = True) -> FusedDecoder:
        assert FusedDecoder.fits(self.model)
        return FusedDecoder(self.model, self.kv, Workspace("cuda"), pdl=pdl, config=CUTS[cut])

    def run(self, fused: FusedDecoder) -> FusedOutput:
        return fused.run(
            self.token_R, self.slot_R, self.pos_R, self.table_SP, logits=True, taps=TAPS, hidden=True,
            width=self.per_slot,
        )  # fmt: skip

    def plain(self) -> tuple[Tensor, list[Tensor], Tensor]:
        attention = KernelAttention(
            self.kv, table_SP=self.table_SP, slot_R=self.slot_R, pos_R=self.pos_R,
            cache_slot_R=cache_slots(self.table_SP, self.slot_R, self.pos_R, PAGE), workspace=Workspace("cuda"),
        )  # fmt: skip
        hidden_RH, taps = self.model.forward(self.token_R, self.pos_R, attention, TAPS)
        return hidden_RH, taps, self.model.logits(hidden_RH)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("arch", list(SHAPES))
@pytest.mark.parametrize(("rows", "per_slot"), [(40, 4), (65, 1), (96, 8), (128, 4), (200, 5), (256, 8)])
def test_the_fused_pass_is_the_plain_pass(arch: str, dtype: torch.dtype, rows: int, per_slot: int) -> None:
    torch.manual_seed(rows)
    case = Case(arch, dtype, rows, per_slot)
    case.kv.data.copy_(case.history)
    hidden_RH, taps, logits_RV = case.plain()
    cache = case.kv.data[:, :, 1:].clone()
    live = case.live
    # What streams in float32 is tested per product; here it would only compile.
    for cut in CUTS if dtype == torch.bfloat16 else ("default", "library"):
        case.kv.data.copy_(case.history)
        out = case.run(case.fused(cut))
        assert out.hidden_RH is not None
        got = [out.hidden_RH, *out.taps, out.logits_RV]
        for a, b in zip(got, [hidden_RH, *taps, logits_RV], strict=True):
            assert relative_error(a[:live], b[:live]) < LIMIT[dtype], cut
        assert torch.equal(out.target_R[:live], out.logits_RV[:live].argmax(-1)), cut
        assert relative_error(case.kv.data[:, :, 1:], cache) < LIMIT[dtype], cut


@pytest.mark.parametrize("cut", list(CUTS))
def test_a_captured_pass_repeats_its_bits(cut: str) -> None:
    """Dependent launches beside library products: 50 replays give what one pass without them gave."""
    torch.manual_seed(0)
    case = Case("llama", torch.bfloat16, 128, 4)
    case.kv.data.copy_(case.history)
    want = case.run(case.fused(cut, pdl=False)).logits_RV.clone()
    fused = case.fused(cut)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.run(fused)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(fused)
    for _ in range(50):
        graph.replay()
        assert torch.equal(out.logits_RV[: case.live], want[: case.live])
    assert want[: case.live].isfinite().all()


def test_a_prompt_in_one_pass_is_its_tokens_one_by_one() -> None:
    torch.manual_seed(1)
    rows = 120
    case = Case("llama", torch.float32, 123, rows)
    case.pos_R[:rows] = torch.arange(rows, device="cuda")
    fused = case.fused("default")
    hidden_RH, _ = fused.forward(case.token_R, case.slot_R, case.pos_R, case.table_SP)
    for t in range(rows):
        at = slice(t, t + 1)
        one = fused.run(
            case.token_R[at], case.slot_R[at], case.pos_R[at], case.table_SP, logits=False, hidden=True
        )  # fmt: skip
        assert one.hidden_RH is not None and relative_error(one.hidden_RH[0], hidden_RH[t]) < 2e-5
