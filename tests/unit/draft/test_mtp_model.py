"""An MTP head against a float64 reading of its formula, alone and inside the engine; layouts; bad checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.draft.detect import kind_of
from slipstream.draft.feature import FeatureDrafter
from slipstream.draft.mtp_fused import FusedMTP
from slipstream.draft.mtp_model import load_mtp, parse_mtp
from slipstream.errors import ConfigError, ModelLoadError, SlipstreamError, UnsupportedError
from slipstream.kernels.eagle import join_norms
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.config import read_json
from slipstream.models.loader import HAS_HEAD, load_model
from tests.support.kit import tiny_model_dir
from tests.support.mtp import MTPFormula, add_mtp, mtp_tensors, write_mtp


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3_5_text", "qwen3_next"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose checkpoint holds a head; with and without norms on q and k, with recurrent layers, with
    experts too."""
    folder = tmp_path_factory.mktemp("mtp") / "target"
    return add_mtp(tiny_model_dir(folder, seed=1, arch=request.param, layers=3), seed=3)


def formula_of(folder: Path) -> tuple[MTPFormula, Any]:
    loaded = load_model(folder, dtype="float64")
    tensors = load_file(folder / "model.safetensors")
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    formula = MTPFormula(head, loaded.config, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
    return formula, loaded.model


def test_hidden_states_and_tokens_are_the_formulas(target: Path) -> None:
    formula, model = formula_of(target)
    head = load_mtp(target, read_json(target / "config.json"), model)
    torch.manual_seed(0)
    with torch.inference_mode():
        at, token = torch.arange(11), torch.randint(0, 96, (11,))
        h = torch.randn(11, 32, dtype=torch.float64)
        state, normed = head.forward(token, head.fuse([h]), at, head.rotary(32), DenseCausal(at))
        want = formula.hidden(token, h)
        torch.testing.assert_close(state, want, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(head.logits(normed), want @ formula.head_VH.T, atol=1e-9, rtol=1e-9)
        # On a GPU what the first product reads comes from an op, by this definition.
        gains = (head.embed_norm.weight, head.hidden_norm.weight)
        joined, _ = join_norms(token, head.embed.table_VH, h, *gains, head.config.rms_norm_eps)
        torch.testing.assert_close(joined, head._joined(token, h), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("arch", "page_size"), [("qwen3", 1), ("llama", 4), ("qwen3_5_text", 4), ("qwen3_next", 1)])
def test_the_pass_of_a_gpu_gives_the_same(tmp_path: Path, arch: str, page_size: int) -> None:
    """Each kernel by its definition, against paged KV that is NaN wherever nothing was written."""
    more = {"head_dim": 16} if arch == "qwen3" else {"layers": 3}
    target = add_mtp(tiny_model_dir(tmp_path / "t", arch=arch, **more))
    model = load_model(target, dtype="float32").model
    head = load_mtp(target, read_json(target / "config.json"), model)
    if model.config.experts is not None:
        assert not FusedMTP.fits(head)
        return
    c, rows = head.config, 11
    torch.manual_seed(0)
    with torch.inference_mode():
        kv = KVPages(
            num_layers=1, num_pages=24, page_size=page_size, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        kv.data.fill_(float("nan"))
        assert FusedMTP.fits(head)
        fused = FusedMTP(head, kv, Workspace("cpu", floats=1 << 12), positions=32, first_cell=1, pdl=False)
        table = torch.zeros(2, 24 // page_size, dtype=torch.int64)
        table[1] = torch.randperm(24 // page_size) + 1
        h, token, at = torch.randn(rows, 32), torch.randint(0, 96, (rows,)), torch.arange(rows)
        state, normed = head.forward(token, head.fuse([h]), at, head.rotary(32), DenseCausal(at))
        logits, x = head.logits(normed), fused.features([h])
        for part in (slice(0, 4), slice(4, 5), slice(5, rows)):
            n = token[part].shape[0]
            last = torch.tensor([n - 1]) if n > 1 else None
            out = fused.run(
                token[part], x[part], torch.ones(n, dtype=torch.int64), at[part] + 1, table, last_B=last, logits=True,
                per_slot=n,
            )  # fmt: skip
            end = part.stop - 1
            torch.testing.assert_close(out.state_BH[0], state[end], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(out.logits_BD[0], logits[end], atol=2e-4, rtol=1e-4)
            assert out.token_B is not None and int(out.token_B[0]) == int(logits[end].argmax())


def test_the_head_of_a_released_layout(golden_dir: Path) -> None:
    """Qwen3.5: gated attention, (1 + w) norms, rotary positions on a part of each head, an encoder beside the model."""
    folder = golden_dir / "target_qwen3_5"
    expected = load_file(folder / "expected.safetensors")
    loaded, tensors = load_model(folder, dtype="float64"), load_file(folder / "model.safetensors")
    assert any("mtp" in note for note in loaded.notes)
    head = load_mtp(folder, read_json(folder / "config.json"), loaded.model)
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    formula = MTPFormula(own, loaded.config, tensors["model.language_model.embed_tokens.weight"],
                         tensors["lm_head.weight"])  # fmt: skip
    tokens = torch.cat([expected["prompt_ids"], expected["greedy_ids"]])
    at = torch.arange(len(tokens))
    with torch.inference_mode():
        h, _ = loaded.model.forward(tokens, at, DenseCausal(at))
        # What the head reads is the reference's last hidden state, which is after the final norm.
        torch.testing.assert_close(h, expected["hidden_states"][-1].double(), atol=2e-4, rtol=2e-4)
        rotary, known, drafts = head.rotary(64), 40, list[int]()
        rows, x = tokens[1:known].tolist(), h[: known - 1]
        for _ in range(3):
            at = torch.arange(len(rows))
            state, normed = head.forward(torch.tensor(rows), x, at, rotary, DenseCausal(at))
            drafts.append(int(head.logits(normed[-1:]).argmax()))
            rows, x = [*rows, drafts[-1]], torch.cat([x, state[-1:]])
        want, states = formula.drafts(tokens[:known].tolist(), h[: known - 1], 3)
    assert drafts == want
    torch.testing.assert_close(x[known - 1 :], states, atol=1e-8, rtol=1e-8)


def watched(llm: LLM) -> list[tuple[list[int], list[int], Tensor]]:
    """Of every round from now on, for each slot: its tokens, the drafts, the state behind the first of them."""
    drafter = llm._built.device.frame.drafter
    seen: list[tuple[list[int], list[int], Tensor]] = []
    real = drafter.propose

    def spy(first: Any, view: Any) -> Any:
        out = real(first, view)
        for i, slot in enumerate(view.slot_B.tolist()):
            if slot:
                tokens = view.history_SL[slot, : int(view.committed_S[slot]) + 1].tolist()
                seen.append((tokens, out.token_BK[i].tolist(), first.state_BH[i].clone()))
        return out

    drafter.propose = spy
    return seen


@pytest.mark.parametrize(("page_size", "chunk", "run_ahead"), [(1, 3, 2), (16, 256, 1)])
def test_the_engine_drafts_what_the_formula_drafts(target: Path, page_size: int, chunk: int, run_ahead: int) -> None:
    """Every fourth round: the tokens, and the hidden state behind the first of them; also after hits of the prefix
    cache, where the last cached position is read again."""
    formula, model = formula_of(target)
    states = {"state_interval": 16} if model.config.delta_layers else {}
    prompts = [[5, 6, 7, 8, 9], [9] * 20, [11], [30, 31, 32]]
    with LLM(
        str(target), dtype="float64", draft="mtp", num_drafts=3, page_size=page_size, prefill_chunk=chunk,
        run_ahead=run_ahead, max_slots=4, max_model_len=96, **states,
    ) as llm:  # fmt: skip
        seen = watched(llm)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        outs = llm.generate(prompts, params)
        again = [p + o.outputs[0].token_ids + [3, 4] for p, o in zip(prompts, outs, strict=True)]
        outs += llm.generate(again, params)
        assert llm.stats()["counters"]["cached_prompt_tokens"] >= 4 * 16
        llm.check_idle()
        assert llm.resolved["draft"] == "MTPDrafter" and HAS_HEAD not in llm.notes
    assert len(seen) >= sum(o.spec.rounds for o in outs) > 60
    with torch.inference_mode():
        for tokens, drafts, state in seen[::4]:
            pos = torch.arange(len(tokens) - 1)
            h, _ = model.forward(torch.tensor(tokens[:-1]), pos, DenseCausal(pos))
            want, states = formula.drafts(tokens, h, 3)
            assert drafts == want
            torch.testing.assert_close(state, states[0], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("arch", ["llama", "qwen3_5_text"])
def test_the_engine_on_the_ops_of_a_gpu(tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's pass as it runs on a GPU, in float32: the formula's drafts, but for near-ties."""
    target = add_mtp(tiny_model_dir(tmp_path / "t", arch=arch, layers=3), seed=3)
    formula, model = formula_of(target)
    made = FeatureDrafter.__init__

    def on_kernels(self: FeatureDrafter, *args: Any, **options: Any) -> None:
        made(self, *args, **{**options, "workspace": Workspace("cpu", floats=1 << 16)})
        assert self.fused is not None

    monkeypatch.setattr(FeatureDrafter, "__init__", on_kernels)
    with LLM(str(target), dtype="float32", draft="mtp", max_slots=3, max_model_len=64) as llm:
        seen = watched(llm)
        prompts = [[5, 6, 7, 8, 9], [9] * 20, [30, 31, 32]]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    with torch.inference_mode():
        same = 0
        for tokens, drafts, state in seen[::3]:
            pos = torch.arange(len(tokens) - 1)
            h, _ = model.forward(torch.tensor(tokens[:-1]), pos, DenseCausal(pos))
            want, states = formula.drafts(tokens, h, 3)
            torch.testing.assert_close(state.double(), states[0], atol=2e-3, rtol=1e-3)
            same += drafts == want
    assert same >= 0.9 * len(seen[::3]) > 10


def test_own_folders_and_their_layouts_are_the_same_head(tmp_path: Path) -> None:
    target = add_mtp(tiny_model_dir(tmp_path / "target", seed=1, arch="qwen3_5_text", layers=3), seed=3)
    tensors = {n: t for n, t in load_file(target / "model.safetensors").items() if n.startswith("mtp.")}
    plain = write_mtp(tmp_path / "plain", target, tensors)
    tables = {"lm_head.weight": torch.zeros(96, 32), "model.embed_tokens.weight": torch.zeros(96, 32)}
    repeats = write_mtp(tmp_path / "repeats", target, {**tensors, **tables})
    theirs = write_mtp(tmp_path / "theirs", target, tensors, speculators=True)
    old = write_mtp(tmp_path / "old", target, tensors)
    torch.save(load_file(old / "model.safetensors"), old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    (old / "config.json").write_text(json.dumps({**read_json(old / "config.json"), "architectures": ["Qwen3NextMTP"]}))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    results = set()
    for draft in ("mtp", *map(str, (plain, repeats, theirs, old))):
        with LLM(str(target), dtype="float64", draft=draft, num_drafts=2, max_model_len=64) as llm:
            assert llm.resolved["draft"] == "MTPDrafter"
            out = llm.generate([[5, 6, 7]], params)[0]
        results.add((tuple(out.outputs[0].token_ids), out.spec.rounds, out.spec.accepted))
    assert len(results) == 1


def test_a_head_may_turn_and_norm_in_its_own_way(tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path / "t", arch="qwen3")
    config = load_model(target).config
    own = parse_mtp({"rope_theta": 500.0, "rms_norm_eps": 1e-3}, config).layer
    assert (own.rope.theta, own.rms_norm_eps) == (500.0, 1e-3) and config.rope.theta == 10000.0
    hybrid = load_model(tiny_model_dir(tmp_path / "h", arch="qwen3_5_text", layers=3)).config
    values = read_json(tmp_path / "h" / "config.json")
    for said in (values, {"text_config": values}, {"transformer_layer_config": values}, {}):
        assert parse_mtp(said, hybrid).layer.rope == hybrid.rope


def test_a_table_of_its_own_and_random_weights(tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path / "t", arch="qwen3", mtp_use_dedicated_embeddings=True)
    add_mtp(target)
    model = load_model(target, dtype="float64").model
    values = read_json(target / "config.json")
    head = load_mtp(target, values, model)
    own = load_file(target / "model.safetensors")["mtp.embed_tokens.weight"].double()
    assert torch.equal(head.embed(torch.arange(96)), own) and head.head is model.head
    assert load_mtp(target, {**values, "mtp_use_dedicated_embeddings": False}, model, seed=0).embed is model.embed
    with LLM(str(target / "config.json"), draft="mtp", load_format="dummy", max_model_len=64) as llm:
        out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        assert out.spec.drafted > 0 and len(out.outputs[0].token_ids) == 12


def test_a_head_without_experts_for_a_model_with_some(tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path / "t", arch="qwen3_next", layers=3)
    dense = {n: t for n, t in mtp_tensors(target).items() if ".mlp." not in n}
    shape = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
    add_mtp(target, {**dense, **{f"mtp.layers.0.mlp.{n}.weight": torch.randn(s) for n, s in shape.items()}})
    formula, model = formula_of(target)
    head = load_mtp(target, read_json(target / "config.json"), model)
    with torch.inference_mode():
        at, h = torch.arange(5), torch.randn(5, 32, dtype=torch.float64)
        state, _ = head.forward(at, h, at, head.rotary(8), DenseCausal(at))
        torch.testing.assert_close(state, formula.hidden(at, h), atol=1e-9, rtol=1e-9)


def test_a_head_in_fp8_blocks(tmp_path: Path) -> None:
    """Blocks of 16 x 24, dequantised as the model's are; what is not in FP8 is taken as it is."""
    high, wide = 16, 24
    quantization = {"quant_method": "fp8", "weight_block_size": [high, wide]}
    target = tiny_model_dir(tmp_path / "t", arch="qwen3", quantization_config=quantization)
    stored, plain = {}, {}
    for name, w in mtp_tensors(target).items():
        stored[name] = plain[name] = w
        if "_proj" in name:
            rows, columns = w.shape
            scale = torch.rand(-(-rows // high), -(-columns // wide)) * 0.02 + 0.005
            full = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
            stored[name], stored[name + "_scale_inv"] = (w / full).to(torch.float8_e4m3fn), scale
            plain[name] = stored[name].float() * full
    add_mtp(target, stored)
    model = load_model(target, dtype="float64").model
    head = load_mtp(target, read_json(target / "config.json"), model)
    other = load_mtp(write_mtp(tmp_path / "d", target, plain), {}, model)
    with torch.inference_mode():
        at, h = torch.arange(5), torch.randn(5, 32, dtype=torch.float64)
        ours, theirs = (m.forward(at, h, at, m.rotary(8), DenseCausal(at))[0] for m in (head, other))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda t: t.pop(name)


@pytest.mark.parametrize("own_folder", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (drop("mtp.fc.weight"), ModelLoadError, "lacks the tensor 'mtp.fc.weight'"),
        (drop("mtp.norm.weight"), ModelLoadError, "lacks the tensor 'mtp.norm.weight'"),
        (drop("mtp.layers.0.mlp.up_proj.weight"), ModelLoadError, "lacks the tensor 'mtp.layers.0.mlp.up_proj.weight'"),
        (lambda t: t.update({"mtp.extra": torch.zeros(1)}), ModelLoadError, "that the model does not: mtp.extra"),
        (
            lambda t: t.update({"mtp.fc.weight": torch.zeros(32, 32)}), ModelLoadError,
            r"'mtp.fc.weight' has shape \[32, 32\]; the config needs \[32, 64\]",
        ),
        (
            lambda t: t.update({"mtp.layers.0.mlp.gate.weight": torch.zeros(4, 32)}), UnsupportedError,
            "mixture of experts, and the model's layers are not",
        ),
        (lambda t: t["mtp.fc.weight"][1, 2:3].fill_(torch.nan), ModelLoadError, "'mtp.fc.weight' .* not finite"),
        (lambda t: t.update({"mtp.0.e_proj.weight": torch.zeros(1)}), UnsupportedError, "DeepSeek-V4"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_named(
    tmp_path: Path, change: Any, error: type[Exception], message: str, own_folder: bool
) -> None:
    target = tiny_model_dir(tmp_path / "t", arch="qwen3")
    tensors = mtp_tensors(target)
    change(tensors)
    draft = str(write_mtp(tmp_path / "d", target, tensors)) if own_folder else "mtp"
    if not own_folder:
        add_mtp(target, tensors)
    with pytest.raises(error, match=message):
        LLM(str(target), draft=draft, max_model_len=64)
    with LLM(str(target), max_model_len=64) as llm:  # the model itself is whole
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finished


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 95}, ConfigError, "vocab_size=95; the model has 96"),
        ({"hidden_size": 40}, ConfigError, "hidden_size=40; the model has 32"),
        ({"mtp_num_hidden_layers": 2}, UnsupportedError, "mtp_num_hidden_layers=2: MTP heads of one layer"),
        ({"mtp_num_hidden_layers": 0}, ConfigError, "mtp_num_hidden_layers=0: this model comes without"),
        ({"mtp_num_hidden_layers": "one"}, ModelLoadError, "mtp_num_hidden_layers='one' must be a whole number"),
        ({"num_nextn_predict_layers": 3}, UnsupportedError, "num_nextn_predict_layers=3"),
        ({"mtp_use_dedicated_embeddings": 1}, ModelLoadError, "mtp_use_dedicated_embeddings=1 must be true or false"),
        ({"mtp_use_dedicated_embeddings": True}, ModelLoadError, "lacks the tensor 'mtp.embed_tokens.weight'"),
        ({"num_attention_heads": 2}, ModelLoadError, r"q_proj.weight' has shape \[48, 32\]"),
        ({"num_attention_heads": "4"}, ModelLoadError, "num_heads='4' must be a whole number"),
        ({"rms_norm_eps": "small"}, ModelLoadError, "rms_norm_eps='small' must be a number"),
        ({"rms_norm_eps": 0}, ModelLoadError, "rms_norm_eps=0.0 must be above 0"),
        ({"rope_theta": "x"}, ModelLoadError, "rope_theta='x'"),
        ({"intermediate_size": 48}, ModelLoadError, r"gate_proj.weight' has shape \[64, 32\]"),
    ],
    ids=str,
)
def test_a_head_for_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    target = tiny_model_dir(tmp_path / "t", arch="qwen3")
    folder = write_mtp(tmp_path / "d", target)
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **changes}))
    with pytest.raises(error, match=message):
        LLM(str(target), draft=str(folder), max_model_len=64)


def test_models_without_a_head(tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path / "t", arch="qwen3")
    with pytest.raises(ModelLoadError, match=r"holds no MTP head: it has no tensors mtp\.\*"):
        LLM(str(target), draft="mtp", max_model_len=64)
    with pytest.raises(UnsupportedError, match=r"draft='mtp' .* is a GGUF file"):
        LLM(draft="mtp", max_model_len=64, device="cpu")
    folder = tmp_path / "v3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLMNextN"]}))
    save_file({"model.layers.0.eh_proj.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"layout of DeepSeek-V3 \(model.layers.0.eh_proj.weight\)"):
        LLM(str(target), draft=str(folder), max_model_len=64)


def test_a_head_that_is_not_loaded_needs_no_memory(tmp_path: Path) -> None:
    target = add_mtp(tiny_model_dir(tmp_path / "t", arch="qwen3"))
    tensors = load_file(target / "model.safetensors")
    need = 4 * sum(t.numel() for name, t in tensors.items() if not name.startswith("mtp."))
    assert load_model(target, memory_bytes=need).notes == [HAS_HEAD]
    with pytest.raises(ConfigError, match="use a smaller model"):
        load_model(target, memory_bytes=need - 1)


def test_a_whole_model_with_a_head_is_a_draft_model(tmp_path: Path) -> None:
    """Its head is meant by "mtp" only; as the path of a draft it is a language model."""
    target = add_mtp(tiny_model_dir(tmp_path / "t", arch="qwen3", seed=1))
    assert kind_of(read_json(target / "config.json"), target) is None
    with LLM(str(target), draft=str(target), max_model_len=64) as llm:
        assert llm.resolved["draft"] == "StandaloneDrafter" and HAS_HEAD in llm.notes
        with pytest.raises(SlipstreamError, match="takes no option"):
            LLM(str(target), draft="mtp", draft_options={"min_n": 1}, max_model_len=64)
