"""EAGLE-3 heads in three formats against the numbers of their reference implementations, and whole rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.draft.eagle3_model import Eagle3Model, load_eagle3
from slipstream.draft.feature import FeatureDrafter
from slipstream.draft.feature_tree import FeatureTreeDrafter
from slipstream.draft.protocol import DraftView, FirstDraft, TargetRows
from slipstream.draft.tree import TreeShape, expand, expand_root, rerank, seen_mask
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.config import read_json
from slipstream.models.layers import Embedding
from tests.support.eagle import stand_in_target

CASES = ("eagle3_official", "eagle3_specforge", "eagle3_deepspec")
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Eagle3Model, dict[str, Tensor]]:
    values, expected = read_json(folder / "config.json"), load_file(folder / "expected.safetensors")
    target = stand_in_target(
        hidden=values.get("target_hidden_size", values["hidden_size"]),
        vocab=values["vocab_size"],
        layers=8,
        dtype=dtype,
    )
    if "target_embed_tokens" in expected:
        target.embed = Embedding(expected["target_embed_tokens"].to(dtype))
    return load_eagle3(folder, values, target), expected


def run(head: Eagle3Model, expected: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    """Extend over all positions, then a greedy chain; dense attention over everything fed so far."""
    aux_LA, ids = expected["aux_hidden_states"].to(head.dtype), expected["token_ids"]
    x_LH = head.fuse(aux_LA.chunk(len(head.taps), -1))
    tokens, states, positions = ids[1:], x_LH, torch.arange(len(ids) - 1)
    rotary = head.rotary(64)
    out: dict[str, Any] = {"hidden": [], "logits": [], "token": []}
    for step in range(steps):
        state, normed = head.forward(tokens, states, positions, rotary, DenseCausal(positions))
        logits = head.logits(normed)
        if step == 0:
            out["extend_hidden"], out["extend_logits"] = state, logits
        draft = logits[-1].argmax()
        token = draft if head.id_D is None else head.id_D[draft]
        for name, value in (("hidden", state[-1]), ("logits", logits[-1]), ("token", token)):
            out[name].append(value)
        tokens, states = torch.cat([tokens, token[None]]), torch.cat([states, state[-1:]])
        positions = torch.arange(len(tokens))
    return {k: torch.stack(v) if isinstance(v, list) else v for k, v in out.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_extend_and_chain(golden_dir: Path, case: str, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        head, expected = load(golden_dir / case, dtype)
        got = run(head, expected, 4)
    assert got["token"].tolist() == expected["chain_token_ids"].tolist()
    for mine, theirs in (
        ("extend_hidden", "extend_hidden"), ("extend_logits", "extend_logits"), ("hidden", "chain_hidden"),
        ("logits", "chain_logits"),
    ):  # fmt: skip
        torch.testing.assert_close(got[mine].float(), expected[theirs], **CLOSE)


def next_logp(head: Eagle3Model, expected: dict[str, Tensor], path: list[int]) -> Tensor:
    """Log-probabilities over the draft vocabulary after the prefix and `path`, by one dense chain over that path."""
    x_LH = head.fuse(expected["aux_hidden_states"].to(head.dtype).chunk(len(head.taps), -1))
    tokens, rotary = expected["token_ids"][1:], head.rotary(64)
    for token in [*path, None]:
        at = torch.arange(len(tokens))
        state, normed = head.forward(tokens, x_LH, at, rotary, DenseCausal(at))
        if token is not None:
            tokens, x_LH = torch.cat([tokens, torch.tensor([token])]), torch.cat([x_LH, state[-1:]])
    return head.logits(normed)[-1].log_softmax(0)


@pytest.mark.parametrize("case", CASES)
def test_tree(golden_dir: Path, case: str) -> None:
    """The functions of draft/tree.py over the head's own laws grow the reference's tree."""
    shape = TreeShape(**json.loads((golden_dir / case / "expected.json").read_text())["tree"])
    with torch.inference_mode():
        head, expected = load(golden_dir / case)
        ids = torch.arange(head.vocab_size) if head.id_D is None else head.id_D
        levels, paths = [expand_root(next_logp(head, expected, [])[None], shape.topk)], list[list[int]]()
        for _ in range(1, shape.levels):
            level = levels[-1]
            parents, drafts = level.parent_BC[0].tolist(), ids[level.draft_BC[0]].tolist()
            paths += [[*(paths[p] if p >= 0 else []), t] for p, t in zip(parents, drafts, strict=True)]
            frontier = [paths[level.first + c] for c in level.frontier_BK[0].tolist()]
            levels.append(expand(torch.stack([next_logp(head, expected, p) for p in frontier])[None], level))
        tree = rerank(levels, shape.total, expected["token_ids"][-1:], head.id_D)
    assert tree.token_BN[0].tolist() == expected["tree_token_ids"].tolist()
    assert tree.parent_BN[0].tolist() == expected["tree_parents"].tolist()
    assert tree.depth_BN[0].tolist() == expected["tree_depth"].tolist()
    base = len(expected["token_ids"]) - 1
    assert (base + tree.depth_BN[0]).tolist() == expected["tree_positions"].tolist()
    assert torch.equal(seen_mask(tree.parent_BN, shape.levels)[0], expected["tree_mask"])
    torch.testing.assert_close(tree.score_BN[0, 1:], expected["tree_scores"], **CLOSE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("page_size", [1, 5, 32])
def test_tree_drafter(golden_dir: Path, case: str, kernels: bool, page_size: int) -> None:
    """The drafter's own passes, a level's nodes in one and each with its ancestors, grow the reference's tree."""
    shape = TreeShape(**json.loads((golden_dir / case / "expected.json").read_text())["tree"])
    with torch.inference_mode():
        head, expected = load(golden_dir / case)
        c, ids = head.config, expected["token_ids"]
        n = len(ids) - 1
        pages = -(-(n + 1 + shape.expanded) // page_size)
        kv = KVPages(
            num_layers=c.num_layers, num_pages=3 * pages, page_size=page_size, num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim, dtype=head.dtype, device=head.device,
        )  # fmt: skip
        kv.data.fill_(float("nan") if kernels else 1e4)  # torch's attention multiplies what it masks by zero
        drafter = FeatureTreeDrafter(
            head, shape=shape, kv=kv, max_drafts=shape.total - 1, max_len=64,
            workspace=Workspace("cpu", floats=1 << 16) if kernels else None,
        )  # fmt: skip
        assert (drafter.fused is not None) == kernels
        tree = drafter.propose(*extended(drafter, expected, pages)).tree
    assert tree is not None
    assert tree.token_BN[0].tolist() == expected["tree_token_ids"].tolist()
    assert tree.parent_BN[0].tolist() == expected["tree_parents"].tolist()
    torch.testing.assert_close(tree.score_BN[0, 1:], expected["tree_scores"], **CLOSE)


def extended(drafter: FeatureTreeDrafter, expected: dict[str, Tensor], pages: int) -> tuple[FirstDraft, DraftView]:
    """What the drafter makes of slot 2, whose prefix was verified in one round, beside an idle slot."""
    ids, slots = expected["token_ids"], torch.tensor([2, 0])
    n = len(ids) - 1
    history_SL = torch.zeros(3, n + 8, dtype=torch.int64)
    history_SL[2, : n + 1] = ids
    table_SP = torch.zeros(3, pages, dtype=torch.int64)
    table_SP[2] = torch.arange(2 * pages, 3 * pages).flip(0) + 1
    row_W = torch.arange(n)
    rows = TargetRows(
        slot_R=torch.cat([torch.full((n,), 2), torch.zeros(1).long()]), pos_R=torch.cat([row_W, torch.zeros(1).long()]),
        token_R=torch.cat([ids[:-1], ids[:1]]), owner_R=torch.cat([torch.zeros(n).long(), torch.ones(1).long()]),
        slot_B=slots, rows_B=torch.tensor([n, 0]), row_of_BW=torch.stack([row_W, torch.full((n,), n)]),
        taps=tuple(torch.cat([t, t[:1]]) for t in expected["aux_hidden_states"].chunk(len(drafter.taps), -1)),
    )  # fmt: skip
    count_B = torch.tensor([n, 0])
    view = DraftView(
        slot_B=slots, committed_B=count_B, drafted_B=count_B, accepted_B=count_B, emitted_B=count_B, rows=rows,
        history_SL=history_SL, committed_S=torch.tensor([0, 0, n]), table_SP=table_SP, params=None, laws=None,
        len_ub=n + 1, first_page=(-1, -1), drafts=15, sampled=False, filtered=False, rejection=False, coupled=False,
    )  # fmt: skip
    return drafter.extend(view), view


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_matters(golden_dir: Path, case: str, tmp_path: Path) -> None:
    """Negative control: whichever tensor changes by 30 %, some number leaves its tolerance."""
    tensors = load_file(golden_dir / case / "model.safetensors")
    (tmp_path / "config.json").write_bytes((golden_dir / case / "config.json").read_bytes())
    (tmp_path / "expected.safetensors").write_bytes((golden_dir / case / "expected.safetensors").read_bytes())
    for name in sorted(tensors):
        if not tensors[name].is_floating_point():
            continue
        noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
        save_file({**tensors, name: tensors[name] * (1 + 0.3 * noise)}, tmp_path / "model.safetensors")
        with torch.inference_mode():
            head, expected = load(tmp_path)
            got = run(head, expected, 1)
        assert not torch.allclose(got["extend_logits"], expected["extend_logits"], **CLOSE), name


@pytest.mark.parametrize("case", CASES)
def test_names_of_other_releases(golden_dir: Path, case: str, tmp_path: Path) -> None:
    """The same tensors as `pytorch_model.bin`, and under the other names for the layer."""
    folder = golden_dir / case
    tensors = load_file(folder / "model.safetensors")
    other = {("midlayer." if "midlayer" not in "".join(tensors) else "layers.0."): None}
    new = next(iter(other))
    old = "layers.0." if new == "midlayer." else "midlayer."
    renamed = {"model." + n.replace(old, new) if n.startswith(old) else n: t for n, t in tensors.items()}
    for name in ("config.json", "expected.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    torch.save(renamed, tmp_path / "pytorch_model.bin")
    with torch.inference_mode():
        head, expected = load(tmp_path)
        got = run(head, expected, 4)
    assert got["token"].tolist() == expected["chain_token_ids"].tolist()


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "kernels"])
@pytest.mark.parametrize(("page_size", "chunk", "run_ahead"), [(1, 256, 1), (16, 5, 2), (32, 256, 8)])
def test_rounds_of_the_reference(
    golden_dir: Path, kind: str, dtype: str, page_size: int, chunk: int, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafted and accepted tokens of every round, and the output, are the reference's.

    kernels: the head's pass as it runs on a GPU, each op by its definition.
    """
    if dtype == "kernels":
        made = FeatureDrafter.__init__

        def on_kernels(self: FeatureDrafter, *args: Any, **options: Any) -> None:
            made(self, *args, **{**options, "workspace": Workspace("cpu", floats=1 << 16)})
            assert self.fused is not None

        monkeypatch.setattr(FeatureDrafter, "__init__", on_kernels)
        dtype = "float32"
    case = json.loads((golden_dir / "e2e_eagle3" / "expected.json").read_text())
    with LLM(
        model=str(golden_dir / "e2e_target"), draft=str(golden_dir / "e2e_eagle3"), dtype=dtype, page_size=page_size,
        prefill_chunk=chunk, run_ahead=run_ahead, max_model_len=128, prefix_cache=False,
        **({"num_drafts": case["chain_steps"]} if kind == "chain" else {"draft_tree": case["tree"]}),
    ) as llm:  # fmt: skip
        for prompt in case["prompts"]:
            rounds = prompt[kind]["rounds"]
            # The reference's rounds run past its 48 tokens, ours end there; so ours get room for all of them.
            want = [prompt["output_ids"][0], *(t for r in rounds for t in r["emitted"])]
            drafts: list[tuple[list[int], list[int] | None]] = []
            frame = llm._built.device.frame
            propose = frame.drafter.propose

            def spy(first: Any, view: Any, propose: Any = propose, drafts: Any = drafts) -> Any:
                out = propose(first, view)
                tree = out.tree
                drafts.append((out.token_BK[0].tolist(), None if tree is None else tree.parent_BN[0].tolist()))
                return out

            frame.drafter.propose = spy
            params = SamplingParams(temperature=0, max_tokens=len(want), ignore_eos=True)
            out = llm.generate(prompt["prompt_ids"], params)[0]
            del frame.drafter.propose
            assert out.outputs[0].token_ids == want
            theirs = [
                (r["draft"], None) if kind == "chain" else (r["tree_tokens"][1:], r["tree_parents"]) for r in rounds
            ]
            assert drafts[: len(rounds)] == theirs
            assert abs(out.spec.rounds - len(rounds)) <= 1
            assert out.spec.emitted == len(want) - 1
        llm.check_idle()
