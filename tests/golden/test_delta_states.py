"""States of gated delta nets against those of the reference implementation, however the tokens come in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.kernels.delta import absorbed_rows, delta_rows, delta_spans
from slipstream.memory.states import StatePool, StateShape
from slipstream.models import load_model
from slipstream.models.delta_net import DeltaNet

CLOSE = {"atol": 2e-4, "rtol": 1e-3}
DRAFTS = 3
SLOT = 2
CASES = ("qwen3_5", "qwen3_next")


class Layer:
    """One layer of a golden case with a pool for it, and the layer's inputs by position."""

    def __init__(self, golden: Path, case: str, dtype: str) -> None:
        self.expected = load_file(golden / f"gdn_state_{case}" / "expected.safetensors")
        loaded = load_model(golden / f"target_{case}", dtype=dtype)
        self.net: DeltaNet = loaded.model.blocks[1].delta  # type: ignore[attr-defined]
        self.dtype = loaded.model.dtype
        d = loaded.config.delta
        assert d is not None
        self.shape = StateShape(1, d.value_heads, d.key_dim, d.value_dim, self.net.inputs, d.conv - 1)
        self.committed_S = torch.zeros(4, dtype=torch.int64)
        self.reset()
        with torch.inference_mode():
            self.x_TX = self.net.project(self.expected["layer_input"].to(self.dtype))[:, : self.net.inputs]

    def reset(self, interval: int = 0, early: int = 0) -> None:
        self.pool = StatePool(
            self.shape, max_slots=3, saved=4, rows=DRAFTS + 1, absorbed_S=torch.zeros(4, dtype=torch.int64),
            saved_SC=torch.arange(16).view(4, 4) % 4 + 1, interval=interval, early=early, dtype=self.dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.pool.state.fill_(float("nan"))  # nothing may be taken from a slot's last owner
        self.pool.recent.fill_(float("nan"))

    def read(self, start: int, length: int) -> Tensor:
        """A chunk of prompt rows, behind the first `start`."""
        out = delta_spans(
            self.x_TX[start : start + length], self.pool.layers[0], self.net.small, [(SLOT, start, length)]
        )
        self.pool.absorbed_S[SLOT] = start + length
        return out

    def frame(self, at: int, rows_RX: Tensor) -> Tensor:
        """A decode frame whose rows stand behind `at` committed tokens, beside an inactive slot and the sink."""
        count = rows_RX.shape[0]
        self.committed_S[SLOT] = at
        slot_B, rows_B = torch.tensor([1, SLOT, 0]), torch.tensor([0, count, 0])
        padded_RX = torch.cat((rows_RX, torch.full_like(rows_RX[:2], float("nan"))))
        owner_R = torch.tensor([1] * count + [2] * (len(padded_RX) - count))
        row_of_BW = torch.stack(
            [torch.zeros(count, dtype=torch.int64), torch.arange(count), torch.full((count,), count)]
        )
        out = delta_rows(
            padded_RX, self.pool.layers[0], self.net.small, self.committed_S, slot_B, rows_B, owner_R, row_of_BW
        )
        absorbed_rows(self.pool.absorbed_S, self.committed_S, slot_B, rows_B)
        assert not out[count:].any(), "padding gives zeros"
        assert self.pool.state[0, 1].isnan().all() and self.pool.absorbed_S[1] == 0, "another slot was touched"
        return out[:count]

    def check(self, tokens: int) -> None:
        """The slot's state and last inputs are the reference's after `tokens` tokens."""
        assert self.pool.absorbed_S[SLOT] == tokens
        state = self.pool.state[0, SLOT]
        torch.testing.assert_close(state, self.expected["recurrent_state"][tokens - 1].to(state.dtype), **CLOSE)
        self.check_inputs(torch.stack([self.recent(p) for p in range(tokens - self.shape.history, tokens)]), tokens)

    def recent(self, position: int) -> Tensor:
        if position < 0:
            return torch.zeros(self.shape.inputs, dtype=self.dtype)
        return self.pool.recent[0, SLOT, position % self.pool.recent.shape[2]]

    def check_inputs(self, rows_HX: Tensor, tokens: int) -> None:
        conv_HC = self.expected["conv_state"][tokens - 1].T[-self.shape.history :]
        got = rows_HX[:, : conv_HC.shape[1]]
        torch.testing.assert_close(got, conv_HC.to(got.dtype), **CLOSE)

    def outputs(self, out_RNV: Tensor, start: int) -> None:
        want = self.expected["layer_output"][start : start + len(out_RNV)]
        z_RC = self.net.project(self.expected["layer_input"].to(self.dtype))[start : start + len(out_RNV)]
        gate = z_RC[:, self.net.inputs :].view(out_RNV.shape)
        got = self.net.out(self.net.norm(out_RNV, gate).flatten(1))
        torch.testing.assert_close(got, want.to(got.dtype), atol=1e-3, rtol=1e-3)


@pytest.fixture(
    scope="module", params=[(case, dtype) for case in CASES for dtype in ("float32", "float64")], ids="-".join
)
def layer(request: pytest.FixtureRequest, golden_dir: Path) -> Layer:
    return Layer(golden_dir, *request.param)


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 2, 5, 24])
def test_prompt_in_chunks(layer: Layer, chunk: int) -> None:
    layer.reset()
    for start in range(0, 24, chunk):
        length = min(chunk, 24 - start)
        layer.outputs(layer.read(start, length), start)
        layer.check(start + length)


@torch.inference_mode()
def test_step_by_step(layer: Layer) -> None:
    layer.reset()
    layer.read(0, 1)
    for at in range(1, 24):
        layer.outputs(layer.frame(at, layer.x_TX[at : at + 1]), at)
        layer.check(at + 1)


@torch.inference_mode()
@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
@pytest.mark.parametrize("prompt", [1, 2, 9])
def test_any_number_of_accepted_drafts(layer: Layer, prompt: int, accepted: int) -> None:
    """A frame with drafts of which some are wrong, then the next frame: the state is plain decoding's."""
    layer.reset()
    layer.read(0, prompt)
    rows = layer.x_TX[prompt : prompt + DRAFTS + 1].clone()
    right = 1 + accepted
    rows[right:] = torch.randn_like(rows[right:]) * 3
    layer.outputs(layer.frame(prompt, rows)[:right], prompt)
    layer.check(prompt + 1)  # the bonus token only: drafts count once they are committed
    at = prompt + right
    layer.outputs(layer.frame(at, layer.x_TX[at : at + 2]), at)
    layer.check(at + 1)


@torch.inference_mode()
def test_rounds_of_every_kind_in_turn(layer: Layer) -> None:
    layer.reset()
    layer.read(0, 3)
    at = 3
    for i in range(8):
        accepted, drafted = i % 3, (1, 3, 2)[i // 3]
        rows = layer.x_TX[at : at + 1 + max(accepted, drafted)].clone()
        rows[1 + accepted :] += 2.0
        if at + len(rows) > 24:
            break
        layer.outputs(layer.frame(at, rows)[: 1 + accepted], at)
        layer.check(at + 1)
        at += 1 + accepted
    assert at > 12


@torch.inference_mode()
@pytest.mark.parametrize("early", [0, 1])
def test_saved_states_are_of_committed_tokens(layer: Layer, early: int) -> None:
    """Every fifth state is saved, from a prompt's rows, a bonus token or a replay; never from a refused draft."""
    layer.reset(interval=5, early=early)
    layer.read(0, 7)
    at = 7
    for accepted in (1, 2, 3, 0, 2):
        rows = layer.x_TX[at : at + DRAFTS + 1].clone()
        rows[1 + accepted :] += 2.0
        layer.frame(at, rows)
        at += 1 + accepted
    ids = layer.pool.saved_SC[SLOT]
    for place in (1, 2, 3):
        tokens = 5 * place - early
        saved = layer.pool.snapshot(int(ids[place]))
        want = layer.expected["recurrent_state"][tokens - 1]
        torch.testing.assert_close(saved.state[0], want.to(saved.state.dtype), **CLOSE)
        layer.check_inputs(saved.inputs[0], tokens)
        # Decoding goes on from it, in a slot that has held something else.
        layer.pool.state[:, SLOT].fill_(float("nan"))
        layer.pool.recent[:, SLOT].fill_(float("nan"))
        layer.pool.restore(SLOT, int(ids[place]), tokens)
        layer.pool.absorbed_S[SLOT] = tokens
        layer.outputs(layer.read(tokens, 4), tokens)
        layer.check(tokens + 4)


@torch.inference_mode()
def test_a_wrong_replay_is_noticed(layer: Layer) -> None:
    """Negative control: one replayed draft too many, or one that is another token's."""
    layer.reset()
    layer.read(0, 9)
    layer.frame(9, layer.x_TX[9:13])
    layer.frame(12, layer.x_TX[11:12])  # its bonus token is the one before
    with pytest.raises(AssertionError):
        layer.check(13)
    layer.reset()
    layer.read(0, 9)
    layer.frame(9, layer.x_TX[9:13])
    layer.pool.absorbed_S[SLOT] -= 1  # the bonus token twice
    layer.frame(12, layer.x_TX[12:13])
    with pytest.raises(AssertionError):
        layer.check(13)
