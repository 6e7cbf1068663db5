"""Drafts learn on a tiny target, resume exactly, and are exported in the released formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import ConfigError
from slipstream.train.calibrate import expected_calibration_error, fit_temperatures, held_out_blocks
from slipstream.train.corpus import Corpus, loops
from slipstream.train.dspark import DSparkHead
from slipstream.train.eagle3 import Eagle3Head, frequent_ids
from slipstream.train.layers import DraftHead, later
from slipstream.train.loop import TrainOptions, batches, evaluate, export, learning_rate, train
from slipstream.train.step import LENGTHS, padded
from slipstream.train.teacher import Features, Teacher
from tests.support.tiny import write_tiny_checkpoint

TAPS = (1, 2, 3)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    folder = write_tiny_checkpoint(
        tmp_path_factory.mktemp("target"), num_hidden_layers=4, vocab_size=40, hidden_size=48, spread=3.0
    )
    return Teacher.load(str(folder), taps=TAPS, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def corpus(teacher: Teacher) -> Corpus:
    """48 greedy continuations of random prompts of 4 tokens, written by the target itself."""
    token = torch.randint(3, 40, (48, 4), generator=torch.Generator().manual_seed(0))
    return Corpus.pack([(t[:4], t[4:]) for t in _continue(teacher, token, 28)], 32)


def _continue(teacher: Teacher, token_BT: torch.Tensor, count: int) -> list[list[int]]:
    """Greedy continuations by the target."""
    for _ in range(count):
        hidden = teacher.features(token_BT).hidden_BTH[:, -1]
        token_BT = torch.cat((token_BT, (hidden @ teacher.head_VH.T).argmax(-1, keepdim=True)), 1)
    return token_BT.tolist()


class Shuffled(Teacher):
    """The control: features of another sequence of the batch, everything else as it is."""

    def __init__(self, teacher: Teacher) -> None:
        self.__dict__.update(teacher.__dict__)

    def features(self, token_BT: torch.Tensor) -> Features:
        true = super().features(token_BT)
        return Features(tap_BTF=true.tap_BTF.roll(1, 0), hidden_BTH=true.hidden_BTH)


def _head(kind: str, teacher: Teacher, corpus: Corpus, seed: int = 1) -> DraftHead:
    torch.manual_seed(seed)
    if kind == "eagle3":
        return Eagle3Head(teacher, frequent_ids(corpus.token_NT, corpus.answer_NT, 40, 32), steps=4)
    return DSparkHead(teacher, mask_token_id=0, block=4, layers=1, rank=8, anchors=16)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_head_learns_and_needs_its_features(kind: str, golden_dir: Path) -> None:
    """Trained alike on a trained target, true features beat those of another sequence by 0.15 at the first draft."""
    folder = golden_dir / "e2e_target"
    teacher = Teacher.load(str(folder), taps=(2, 4, 5), device="cpu", dtype="float32")
    known = json.loads((folder / "expected.json").read_text())["prompts"]
    whole = [p["prompt_ids"] + p["greedy_ids"] for p in known]
    starts = [ids[at : at + 16] for ids in whole for at in range(0, len(ids) - 16, 2)]
    corpus = Corpus.pack([(t[:16], t[16:]) for t in _continue(teacher, torch.tensor(starts), 12)], 28)
    options = TrainOptions(steps=50, batch=32, lr=4e-3, log_every=49)
    first = {}
    for name, source in (("true", teacher), ("shuffled", Shuffled(teacher))):
        torch.manual_seed(1)
        head: DraftHead
        if kind == "eagle3":
            head = Eagle3Head(source, frequent_ids(corpus.token_NT, corpus.answer_NT, 160, 140), steps=2)
        else:
            head = DSparkHead(source, mask_token_id=0, block=2, layers=1, rank=16, anchors=12)
        history = train(head, source, corpus, options)
        assert history.loss[-1] < history.loss[0]
        first[name] = history.acceptance[-1][0]
    assert first["true"] > first["shuffled"] + 0.15, first


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    kind: str, teacher: Teacher, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TrainOptions(steps=9, batch=16, lr=1e-3, checkpoint_every=4, log_every=3)
    whole = _head(kind, teacher, corpus)
    train(whole, teacher, corpus, options)

    class Stop(Exception):
        pass

    def stop(step: int, *_: object) -> None:
        if step == 7:
            raise Stop

    broken = _head(kind, teacher, corpus)
    with pytest.raises(Stop):
        train(broken, teacher, corpus, options, folder=tmp_path, progress=stop)
    again = _head(kind, teacher, corpus, seed=99)
    history = train(again, teacher, corpus, options, folder=tmp_path)
    assert history.step == [0, 3, 6, 8]
    for (name, a), (_, b) in zip(whole.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)
    with pytest.raises(ConfigError, match=r"lr=0\.001"):
        train(again, teacher, corpus, TrainOptions(steps=9, batch=16, lr=2e-3), folder=tmp_path)


def test_the_unrolled_eagle_step_is_what_a_chain_computes(teacher: Teacher, corpus: Corpus) -> None:
    """Step s of the loss at index i must equal a chain drafted from i: a full recompute over explicit keys."""
    head = _head("eagle3", teacher, corpus)
    assert isinstance(head, Eagle3Head)
    token = corpus.token_NT[:1]
    features = teacher.features(token)
    seen: list[torch.Tensor] = []
    handle = head.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    head.loss(token, corpus.answer_NT[:1], features)
    handle.remove()
    at = corpus.answer_NT[0, 1:].nonzero().flatten().tolist()
    layer, attn = head.midlayer, head.midlayer.self_attn
    g = head.fc(features.tap_BTF)[0]
    i = 11
    ids = [int(token[0, j + 1]) for j in range(i + 1)]
    states, places = [g[j] for j in range(i + 1)], list(range(i + 1))
    for s in range(head.steps):
        x = torch.stack(
            [
                torch.cat((layer.input_layernorm(head.embed_VH[t]), layer.hidden_norm(h)))
                for t, h in zip(ids, states, strict=True)
            ]
        )
        rope = head.rope_table[torch.tensor(places)]
        q, k, v = attn.queries(x, rope)[-1], attn.keys(x, rope), attn.values(x)
        groups = q.shape[0] // k.shape[1]
        out = []
        for n in range(q.shape[0]):
            p = (k[:, n // groups] @ q[n] * q.shape[-1] ** -0.5).softmax(0)
            out.append(p @ v[:, n // groups])
        h = states[-1] + attn.o_proj(torch.cat(out))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
        row = at.index(i + 1 + s)  # the target predicted after that position what the chain drafts here
        torch.testing.assert_close(head.norm(h), seen[s][row], rtol=1e-4, atol=1e-5)
        ids.append(int(token[0, i + 2 + s]))
        states.append(h)
        places.append(i + 1 + s)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_fixed_shapes_change_nothing(kind: str, teacher: Teacher, corpus: Corpus) -> None:
    """The padded batch has the loss, the agreement and the gradients of the batch as it is."""
    head = _head(kind, teacher, corpus)
    part = corpus.take(torch.tensor([3, 9, 20]))
    longest = int(part.length_N.max())
    token_BT, answer_BT = part.token_NT[:, :longest], part.answer_NT[:, :longest]
    token, answer = padded(part, room=5 * LENGTHS)
    assert token.shape == answer.shape == (5, LENGTHS) and answer.sum() == answer_BT.sum()
    inputs = head.inputs(token, answer)
    if isinstance(head, DSparkHead):  # the same anchors
        inputs[2][:3], inputs[2][3:] = head.inputs(token_BT, answer_BT)[2][:, : inputs[2].shape[1]], 0
        first = head.loss_of((token_BT, answer_BT, inputs[2][:3]), teacher.features(token_BT))
    else:
        assert len(inputs[1]) in (80, 160, 240, 320) and inputs[2].sum() == answer_BT[:, 1:].sum()
        first = head.loss(token_BT, answer_BT, teacher.features(token_BT))
    results = []
    for loss, metrics in (first, head.loss_of(inputs, teacher.features(token))):
        results.append((loss, metrics["acceptance"], torch.autograd.grad(loss, list(head.parameters()))))
    (loss, accepted, grads), (got_loss, got_accepted, got_grads) = results
    torch.testing.assert_close(got_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_accepted, accepted, rtol=0, atol=1e-6)
    for got, want in zip(got_grads, grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_acceptance_of_held_out_text_is_that_of_its_parts(teacher: Teacher, corpus: Corpus) -> None:
    head = _head("eagle3", teacher, corpus)
    part = corpus.take(torch.arange(10))
    together = evaluate(head, teacher, part, batch=10)
    one = head.loss(part.token_NT, part.answer_NT, teacher.features(part.token_NT))[1]["acceptance"]
    torch.testing.assert_close(torch.tensor(together), one, rtol=0, atol=1e-6)
    apart = evaluate(head, teacher, part, batch=4)
    assert all(abs(a - b) < 0.05 for a, b in zip(apart, together, strict=True))


def test_exports_have_the_released_names(teacher: Teacher, corpus: Corpus, tmp_path: Path) -> None:
    eagle = export(_head("eagle3", teacher, corpus), tmp_path / "e")
    tensors = load_file(eagle / "model.safetensors")
    assert {
        "fc.weight",
        "midlayer.self_attn.q_proj.weight",
        "midlayer.hidden_norm.weight",
        "norm.weight",
        "d2t",
        "t2d",
    } <= set(tensors)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 96)
    assert int(tensors["t2d"].sum()) == len(tensors["d2t"]) == 32
    ids = torch.arange(32) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero().squeeze(1))
    spark = export(_head("dspark", teacher, corpus), tmp_path / "d")
    tensors = load_file(spark / "model.safetensors")
    assert tensors["markov_head.markov_w1.weight"].shape == tensors["markov_head.markov_w2.weight"].shape == (40, 8)
    assert tensors["confidence_head.proj.weight"].shape == (1, 48 + 8)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)
    values = json.loads((spark / "config.json").read_text())
    assert values["target_layer_ids"] == [0, 1, 2] and values["block_size"] == 4


def test_temperatures_repair_confidences_that_are_too_sure() -> None:
    """Blocks whose true survival is sigmoid(z) per slot, reported as sigmoid(2 z): the temperature found is 2."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(20_000, 3, generator=g) + 0.5
    held = torch.rand(20_000, 3, generator=g) < z.sigmoid()
    found = fit_temperatures(2 * z, held.long().cumprod(-1).sum(-1))
    assert all(abs(t - 2.0) < 0.35 for t in found.temperatures), found
    assert all(a < 0.03 and a < b for a, b in zip(found.ece_after, found.ece_before, strict=True)), found
    assert expected_calibration_error(torch.full((10,), 0.75), torch.tensor([True] * 5 + [False] * 5)) == pytest.approx(
        0.25
    )


def test_calibration_blocks_follow_the_heads_own_path(teacher: Teacher, corpus: Corpus) -> None:
    head = _head("dspark", teacher, corpus)
    assert isinstance(head, DSparkHead)
    train(head, teacher, corpus, TrainOptions(steps=20, batch=16, lr=3e-3))
    logits, accepted = held_out_blocks(head, teacher, corpus.take(torch.arange(8)))
    assert logits.shape[1] == 4 and logits.shape[0] == accepted.shape[0] > 50
    assert int(accepted.sum()) > 0 and int(accepted.max()) <= 4


def test_small_things() -> None:
    x = torch.arange(6).view(1, 6)
    assert later(x, 2).tolist() == [[2, 3, 4, 5, 0, 0]]
    assert loops([1, 2, 3] * 9) and not loops(list(range(30))) and not loops([1, 2])
    options = TrainOptions(steps=100, batch=4, lr=1.0 / 2, warmup=0.1)
    rates = [learning_rate(s / 100, options) for s in range(100)]
    assert rates[0] == pytest.approx(0.05) and max(rates) == pytest.approx(0.5) and rates[-1] < 0.001
    with pytest.raises(ConfigError, match="steps=0"):
        TrainOptions(steps=0)


def test_batches_see_everything_once_and_hold_few_pads() -> None:
    length_N = torch.tensor([5, 100, 7, 90, 6, 95, 8, 110, 5, 7, 6, 99])
    options = TrainOptions(steps=100, batch=4)
    room = 4 * int(length_N.sum()) / len(length_N)
    for epoch_seed in (0, 1):
        order = batches(length_N, replace(options, seed=epoch_seed))
        for _ in range(2):
            seen: list[int] = []
            while len(seen) < len(length_N):
                index_B = next(order)
                assert len(index_B) == 1 or len(index_B) * int(length_N[index_B].max()) <= room + 1
                # Short and long ones apart, but for the one batch where they meet.
                seen += index_B.tolist()
            assert sorted(seen) == list(range(len(length_N)))
    again = batches(length_N, options)
    assert [next(again).tolist() for _ in range(5)] == [
        b.tolist() for b, _ in zip(batches(length_N, options), range(5), strict=False)
    ]


def test_a_wider_head_begins_where_the_narrow_one_does(teacher: Teacher, corpus: Corpus) -> None:
    """Its own columns start small; what the target's last MLP gives is there."""
    ids = torch.arange(teacher.model_config.vocab_size)
    inner = teacher.model_config.intermediate_size
    wide = Eagle3Head(teacher, ids, inner=2 * inner)
    end = teacher.last_block
    assert end is not None
    assert torch.equal(wide.midlayer.mlp.down_proj.weight[:, :inner], end.down_HF)
    assert wide.export()[1]["intermediate_size"] == 2 * inner
    token_BT, answer_BT = corpus.token_NT[:4], corpus.answer_NT[:4]
    loss, _ = wide.loss(token_BT, answer_BT, teacher.features(token_BT))
    assert torch.isfinite(loss)


def test_a_corpus_survives_the_disk(corpus: Corpus, tmp_path: Path) -> None:
    corpus.save(tmp_path / "c.safetensors")
    again = Corpus.load(tmp_path / "c.safetensors")
    assert torch.equal(again.token_NT, corpus.token_NT) and torch.equal(again.answer_NT, corpus.answer_NT)
    rest, held = corpus.split(10)
    assert len(rest) == 38 and len(held) == 10 and torch.equal(held.token_NT, corpus.token_NT[38:])
    with pytest.raises(ConfigError, match="held_out=48"):
        corpus.split(48)


def test_two_processes_end_with_one_head(tmp_path: Path) -> None:
    """Both see other batches; the averaged gradients keep them together; only the first writes."""
    program = tmp_path / "both.py"
    program.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from slipstream.train.corpus import Corpus\n"
        "from slipstream.train.eagle3 import Eagle3Head\n"
        "from slipstream.train.loop import TrainOptions, train\n"
        "from slipstream.train.ranks import Ranks\n"
        "from slipstream.train.teacher import Teacher\n"
        "from tests.support.tiny import write_tiny_checkpoint\n"
        "torch.set_num_threads(1)\n"
        "out, ranks = Path(sys.argv[1]), Ranks.join('cpu')\n"
        "folder = write_tiny_checkpoint(out / f'm{ranks.rank}', num_hidden_layers=2, vocab_size=40, hidden_size=32)\n"
        "teacher = Teacher.load(str(folder), taps=(0, 1, 1), device='cpu', dtype='float32')\n"
        "ids = torch.randint(3, 40, (24, 16), generator=torch.Generator().manual_seed(0)).tolist()\n"
        "corpus = Corpus.pack([(x[:4], x[4:]) for x in ids], 16)\n"
        "torch.manual_seed(0)\n"
        "head = Eagle3Head(teacher, torch.arange(40), steps=2)\n"
        "options = TrainOptions(steps=6, batch=4, checkpoint_every=6, log_every=2)\n"
        "history = train(head, teacher, corpus, options, folder=out / 'state', ranks=ranks)\n"
        "total = sum(float(p.detach().double().abs().sum()) for p in head.parameters())\n"
        "(out / f'rank{ranks.rank}').write_text(f'{total!r} {history.loss!r}')\n"
        "ranks.leave()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program),
         str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (first, losses), (second, others) = ((tmp_path / f"rank{r}").read_text().split(" ", 1) for r in (0, 1))
    assert float(first) == pytest.approx(float(second), rel=1e-12) and losses != others
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["state-6.safetensors", "state.json"]
