"""Every variant of the head against a float64 reading of its formula, and as it runs on a GPU; bad checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.attention.dense import DenseCausal
from slipstream.draft.checkpoint import TensorTable
from slipstream.draft.detect import kind_of
from slipstream.draft.eagle3_config import parse_eagle3, tap_layers
from slipstream.draft.eagle3_fused import FusedHead
from slipstream.draft.eagle3_model import Eagle3Model, draft_ids, load_eagle3
from slipstream.errors import ConfigError, ModelLoadError, UnsupportedError
from slipstream.kernels.tuning import PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from tests.support.eagle import DIM, HEADS, KV_HEADS, head_tensors, head_values, stand_in_target

H, V, ROWS = 32, 48, 11
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "official": ({"draft_vocab": 20}, {}),
    "normed residual": ({}, {"norm_before_residual": True}),
    "qk-norm": ({"qk_norm": True}, {}),
    "norm per feature": ({"tap_norms": True}, {"fc_norm": True}),
    "norm before fc": ({"input_norm": True, "fc_bias": True}, {"norm_before_fc": True}),
    "plain second layer": ({"wide": (True, False)}, {"num_hidden_layers": 2}),
    "three layers that read the embedding": ({"wide": (True, True, True)}, {"num_hidden_layers": 3}),
    "post-norm state": ({}, {"norm_output": True}),
}


def formula(tensors: dict[str, Tensor], values: dict[str, Any], token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Next state and logits of all rows, one sequence, row r at position r: from the papers, tensor by tensor."""
    t = {n: v.double() for n, v in tensors.items()}

    def rms(v: Tensor, name: str) -> Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + values["rms_norm_eps"]).sqrt() * t[name + ".weight"]

    def turn(v: Tensor) -> Tensor:
        out = torch.empty_like(v)
        for r in range(v.shape[0]):
            for i in range(DIM // 2):
                angle = torch.tensor(r * 10000.0 ** (-2 * i / DIM), dtype=torch.float64)
                a, b = v[r, :, i], v[r, :, i + DIM // 2]
                out[r, :, i], out[r, :, i + DIM // 2] = (
                    a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
                )  # fmt: skip
        return out

    e = t["embed_tokens.weight"][token]
    for i in range(values["num_hidden_layers"]):
        p = f"layers.{i}."
        if p + "hidden_norm.weight" in t:
            hidden = rms(x, p + "hidden_norm")
            joined, residual = torch.cat([rms(e, p + "input_layernorm"), hidden], -1), x
            residual = hidden if values.get("norm_before_residual") else x
        else:
            joined, residual = rms(x, p + "input_layernorm"), x
        q, k, v = (joined @ t[p + f"self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = q.view(-1, HEADS, DIM), k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)
        if p + "self_attn.q_norm.weight" in t:
            q, k = rms(q, p + "self_attn.q_norm"), rms(k, p + "self_attn.k_norm")
        q, k = turn(q), turn(k)
        out = torch.zeros_like(q)
        for r in range(q.shape[0]):
            for n in range(HEADS):
                m = n * KV_HEADS // HEADS
                weight = (k[: r + 1, m] @ q[r, n] / DIM**0.5).softmax(0)
                out[r, n] = weight @ v[: r + 1, m]
        x = residual + out.flatten(1) @ t[p + "self_attn.o_proj.weight"].T
        y = rms(x, p + "post_attention_layernorm")
        gate, up = y @ t[p + "mlp.gate_proj.weight"].T, y @ t[p + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ t[p + "mlp.down_proj.weight"].T
    normed = rms(x, "norm")
    return normed if values.get("norm_output") else x, normed @ t["lm_head.weight"].T


def features(tensors: dict[str, Tensor], taps: list[Tensor]) -> Tensor:
    t = {n: v.double() for n, v in tensors.items()}
    unit = lambda v: v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    if "fc_norm.0.weight" in t:
        taps = [unit(v) * t[f"fc_norm.{i}.weight"] for i, v in enumerate(taps)]
    joined = torch.cat(taps, -1)
    if "input_norm.weight" in t:
        joined = unit(joined) * t["input_norm.weight"]
    return joined @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(H, dtype=torch.float64))


def make(variant: str, dtype: torch.dtype, **options: bool) -> tuple[Eagle3Model, dict[str, Tensor], dict[str, Any]]:
    shape, changes = VARIANTS[variant]
    tensors = head_tensors(hidden=H, vocab=V, own_embedding=True, **shape)
    flat = head_values(hidden=H, vocab=V, draft_vocab=shape.get("draft_vocab"), **changes)
    keys = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *changes)
    outer = {k: v for k, v in flat.items() if k in keys and k != "num_hidden_layers"}
    values = {**outer, "transformer_layer_config": {k: v for k, v in flat.items() if k not in outer}}
    values["speculators_model_type"] = "eagle3"
    target = stand_in_target(hidden=H, vocab=V, layers=4, dtype=dtype)
    config, table = parse_eagle3(values, target.config), TensorTable(tensors)
    return Eagle3Model(config, table, target, draft_ids(table, config, target.device), **options), tensors, flat


@pytest.mark.parametrize("variant", VARIANTS)
def test_formula(variant: str) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        head, tensors, values = make(variant, torch.float64)
        taps = [torch.randn(ROWS, H, dtype=torch.float64) for _ in range(2)]
        token, at = torch.randint(0, V, (ROWS,)), torch.arange(ROWS)
        x = head.fuse(taps)
        torch.testing.assert_close(x, features(tensors, taps), atol=1e-10, rtol=1e-10)
        state, normed = head.forward(token, x, at, head.rotary(32), DenseCausal(at))
        want_state, want_logits = formula(tensors, values, token, x)
        # The rotary table rounds its frequencies to float32, as reference implementations do.
        torch.testing.assert_close(state, want_state, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(head.logits(normed), want_logits, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_nobody_wants_leave_the_others_as_they_are(variant: str) -> None:
    torch.manual_seed(1)
    with torch.inference_mode():
        head, _, _ = make(variant, torch.float64)
        token, at = torch.randint(0, V, (ROWS,)), torch.arange(ROWS)
        x = head.fuse([torch.randn(ROWS, H, dtype=torch.float64) for _ in range(2)])
        whole = head.forward(token, x, at, head.rotary(32), DenseCausal(at))
        for wanted in ([3, 0, 10], []):
            part = head.forward(token, x, at, head.rotary(32), DenseCausal(at), torch.tensor(wanted, dtype=torch.int64))
            for some, every in zip(part, whole, strict=True):
                torch.testing.assert_close(some, every[wanted], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rounded_to_8_bits(variant: str) -> None:
    torch.manual_seed(2)
    with torch.inference_mode():
        (exact, _, _), (rounded, _, _) = make(variant, torch.bfloat16), make(variant, torch.bfloat16, rounded=True)
        assert rounded.pass_bytes() < 0.6 * exact.pass_bytes()
        token, at = torch.randint(0, V, (ROWS,)), torch.arange(ROWS)
        taps = [torch.randn(ROWS, H, dtype=torch.bfloat16) for _ in range(2)]
        want, got = (
            h.logits(h.forward(token, h.fuse(taps), at, h.rotary(32), DenseCausal(at))[1]) for h in (exact, rounded)
        )
        assert 0 < (got - want).norm() < 0.06 * want.norm()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("page_size", "cut"),
    [(1, PassConfig()), (4, PassConfig()), (4, PassConfig(rope=0, residual=0, silu=0, head=0, linear=0))],
    ids=("1", "4", "library"),
)
def test_the_pass_of_a_gpu_gives_the_same(variant: str, page_size: int, cut: PassConfig) -> None:
    """Each kernel by its definition, against paged KV that is NaN wherever nothing was written."""
    torch.manual_seed(0)
    with torch.inference_mode():
        head, _, _ = make(variant, torch.float32)
        c = head.config
        kv = KVPages(
            num_layers=c.num_layers, num_pages=24, page_size=page_size, num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim, dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        kv.data.fill_(float("nan"))
        work = Workspace("cpu", floats=1 << 12)
        assert FusedHead.fits(head)
        fused = FusedHead(head, kv, work, positions=32, first_cell=1, pdl=False, config=cut)
        table = torch.zeros(2, 24 // page_size, dtype=torch.int64)
        table[1] = torch.randperm(24 // page_size) + 1
        taps = [torch.randn(ROWS, H) for _ in range(2)]
        token, at = torch.randint(0, V, (ROWS,)), torch.arange(ROWS)
        state, normed = head.forward(token, head.fuse(taps), at, head.rotary(32), DenseCausal(at))
        logits = head.logits(normed)
        x = fused.features(taps)
        for rows in (slice(0, 4), slice(4, 5), slice(5, ROWS)):
            n = token[rows].shape[0]
            last = torch.tensor([n - 1]) if n > 1 else None
            out = fused.run(
                token[rows], x[rows], torch.ones(n, dtype=torch.int64), at[rows] + 1, table, last_B=last, logits=True,
                per_slot=n,
            )  # fmt: skip
            end = rows.stop - 1
            torch.testing.assert_close(out.state_BH[0], state[end], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(out.logits_BD[0], logits[end], atol=2e-4, rtol=1e-4)
            best = logits[end].argmax()
            assert out.token_B is not None and int(out.token_B[0]) == int(
                best if head.id_D is None else head.id_D[best]
            )


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    values = head_values(hidden=H, vocab=V, draft_vocab=20, **changes)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return values


def load(folder: Path, values: dict[str, Any], **sizes: int) -> Eagle3Model:
    return load_eagle3(folder, values, stand_in_target(**{"hidden": H, "vocab": V, "layers": 4, **sizes}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "lacks the tensor 'fc.weight'"),
        (lambda t: t.pop("d2t") is t.pop("t2d"), "needs the tensor 'd2t'"),
        (lambda t: t.update(extra=torch.zeros(1)), "tensors that the model does not: extra"),
        (lambda t: t.update({"fc.weight": torch.zeros(H, 3 * H)}), r"'fc.weight' has shape \[32, 96\].*\[32, 64\]"),
        (lambda t: t.update(d2t=t["d2t"] + 40), "'d2t' leads to ids"),
        (lambda t: t.update(d2t=-torch.arange(20)), "the same id twice"),
        (lambda t: t["fc.weight"][3, 5:6].fill_(float("nan")), "tensor 'fc.weight' of the draft .*not finite"),
        (lambda t: t["norm.weight"][:1].fill_(float("-inf")), "tensor 'norm.weight' of the draft .*not finite"),
        (lambda t: t.update(t2d=~t["t2d"]), "'d2t' and 't2d' name different ids"),
        (lambda t: t.update(d2t=torch.zeros(9, dtype=torch.int64)), r"'d2t' names \[9\] ids"),
        (lambda t: t.update({"midlayer.hidden_norm.weight": torch.ones(H)}), "'layers.0.hidden_norm.weight' twice"),
    ],
)
def test_damaged_checkpoints_are_named(tmp_path: Path, change: Any, message: str) -> None:
    tensors = head_tensors(hidden=H, vocab=V, draft_vocab=20)
    change(tensors)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"vocab": 50}, "vocab_size=48; the model has 50"),
        ({}, {"hidden": 40}, "hidden_size=32; the model has 40"),
        ({"target_hidden_size": 40}, {}, "target_hidden_size=40; the model has 32"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4]}, {}, r"layer_ids=\[0, 4\] does not fit.*4 layers allow 0 to 3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1]}, {}, "each once"),
        (
            {"eagle_aux_hidden_state_layer_ids": None, "target_layer_ids": [-2, 1]}, {},
            r"target_layer_ids=\[-2, 1\].*-1 to 2",
        ),
    ],
)  # fmt: skip
def test_a_head_for_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    values = write(tmp_path, head_tensors(hidden=H, vocab=V, draft_vocab=20), **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, values, **sizes)


@pytest.mark.parametrize("value", ["no", 0, 1, [], {"a": 1}])
@pytest.mark.parametrize("key", ["norm_before_residual", "norm_output"])
def test_flags_that_are_neither_true_nor_false(tmp_path: Path, key: str, value: Any) -> None:
    """norm_output counts where speculators wrote the config."""
    values = write(tmp_path, head_tensors(hidden=H, vocab=V, draft_vocab=20))
    target = stand_in_target(hidden=H, vocab=V, layers=4)
    values = {**values, "transformer_layer_config": values} if key == "norm_output" else values
    with pytest.raises(ModelLoadError, match=rf"{key}=.* must be true or false"):
        parse_eagle3({**values, key: value}, target.config)
    assert not parse_eagle3({**values, key: None}, target.config).feeds_norm


@pytest.mark.parametrize("value", [0, True, 49, 20.0, "20"])
def test_sizes_of_a_draft_vocabulary_that_are_none(tmp_path: Path, value: Any) -> None:
    values = write(tmp_path, head_tensors(hidden=H, vocab=V, draft_vocab=20))
    with pytest.raises(ModelLoadError, match=f"draft_vocab_size={value!r} must be from 1 to vocab_size=48"):
        load(tmp_path, {**values, "draft_vocab_size": value})


def test_layer_ids_of_every_convention() -> None:
    assert tap_layers({"eagle_aux_hidden_state_layer_ids": [1, 5]}, 8) == (1, 5)
    assert tap_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}, 8) == (2, 6)
    assert tap_layers({"target_layer_ids": [-1, 0, 5]}, 8) == (0, 1, 6)
    assert tap_layers({}, 32) == (2, 16, 29)
    with pytest.raises(ConfigError, match="more than 4 layers"):
        tap_layers({}, 4)


def test_ids_from_the_mask_alone_and_a_head_without_one(tmp_path: Path) -> None:
    """speculators may leave d2t out; a head without lm_head takes the target's rows."""
    tensors = head_tensors(hidden=H, vocab=V, draft_vocab=20)
    ids = tensors.pop("d2t") + torch.arange(20)
    del tensors["lm_head.weight"]
    values = write(tmp_path, tensors)
    target = stand_in_target(hidden=H, vocab=V, layers=4)
    target.head.weight_NK.copy_(torch.randn(V, H))
    head = load_eagle3(tmp_path, values, target)
    assert torch.equal(head.id_D, ids) and torch.equal(head.head.weight_NK, target.head.weight_NK[ids])  # type: ignore


def test_a_damaged_bin_is_named(tmp_path: Path) -> None:
    values = head_values(hidden=H, vocab=V)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(ModelLoadError, match=r"pytorch_model.bin is not a readable file of weights"):
        load(tmp_path, values)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "eagle3"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "dspark"),
        ({"architectures": ["LlamaForCausalLM"]}, None),
    ],
)
def test_kinds(tmp_path: Path, values: dict[str, Any], kind: str | None) -> None:
    assert kind_of(values, tmp_path) == kind


def test_kinds_by_their_tensors(tmp_path: Path) -> None:
    """Official heads over the whole vocabulary have a plain Llama config."""
    plain = {"architectures": ["LlamaForCausalLM"]}
    save_file({"midlayer.mlp.up_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert kind_of(plain, tmp_path) == "eagle3"
    save_file(
        {n: torch.zeros(1) for n in ("fc.weight", "layers.0.self_attn.q_proj.weight")}, tmp_path / "model.safetensors"
    )
    assert kind_of(plain, tmp_path) == "eagle"
    from slipstream.draft.detect import drafter_class

    with pytest.raises(UnsupportedError, match="'eagle' are not supported"):
        drafter_class("eagle")
