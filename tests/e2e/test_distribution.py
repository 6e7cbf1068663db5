"""Unseeded sampling keeps the target's law: six tokens, at least three rounds, the engine's own random numbers.

The exact joint law comes from enumerating a tiny target. Sample size: to detect a total variation d over K cells,
4 N d^2 = 5 sqrt(2 K); with K <= 700 pooled cells, d = 0.08 needs N = 7.3k and d = 0.02 (the full run) N = 117k.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.draft.choose import choose
from slipstream.draft.oracle import OracleDrafter
from slipstream.draft.standalone import StandaloneDrafter
from slipstream.sampling.processors import process_logits
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.mtp import write_mtp
from tests.support.reference import as_asked
from tests.support.tiny import write_tiny_checkpoint

VOCAB, TOKENS = 4, 6
ASKED = {"presence_penalty": 1.0, "frequency_penalty": 0.8, "repetition_penalty": 1.4, "logit_bias": {2: 1.0}}
PROMPT = [1, 3, 0, 1, 3]
SAMPLES = 117_760 if os.environ.get("SLIPSTREAM_FULL") == "1" else 7_680
ALPHA = 1e-5


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("law")
    small = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "intermediate_size": 32, "spread": 3.0}
    return {
        "target": write_tiny_checkpoint(root / "t", seed=4, **small),
        "draft": write_tiny_checkpoint(root / "d", seed=11, **small),
        "eagle3": write_eagle3(root / "e", root / "t", eagle_aux_hidden_state_layer_ids=[0]),
        "eagle3-part": write_eagle3(root / "f", root / "t", draft_vocab=3, eagle_aux_hidden_state_layer_ids=[0]),
        "mtp": write_mtp(root / "m", root / "t", seed=5),
        "dflash": write_block_draft(root / "b", root / "t", "dflash", block_size=4, seed=2),
        "dspark": write_block_draft(root / "s", root / "t", "dspark", block_size=3, seed=3, head="rnn"),
    }


def exact_law(
    llm: LLM, params: SamplingParams, allowed: Callable[[tuple[int, ...]], list[int]] | None = None
) -> np.ndarray:
    """Probability [V] * TOKENS of every continuation, by one dense pass over all of them. allowed: a grammar."""
    model = llm._built.model
    law = np.ones((VOCAB,) * TOKENS)
    with torch.inference_mode():
        for length in range(TOKENS):
            table = np.zeros((VOCAB,) * (length + 1))
            for prefix in itertools.product(range(VOCAB), repeat=length):
                ids = PROMPT + list(prefix)
                pos = torch.arange(len(ids))
                hidden, _ = model.forward(torch.tensor(ids), pos, DenseCausal(pos))
                one = torch.ones(1)
                raw = as_asked(model.logits(hidden[-1:]), params, PROMPT, prefix)
                if allowed is not None:
                    raw[0, [t for t in range(VOCAB) if t not in allowed(prefix)]] = float("-inf")
                logits = process_logits(
                    raw, one * params.temperature,
                    torch.tensor([params.top_k]), one * params.top_p, one * params.min_p, None, filtered=True,
                )  # fmt: skip
                table[prefix] = logits.double().softmax(1)[0].numpy()
            law *= table.reshape(table.shape + (1,) * (TOKENS - length - 1))
    assert abs(law.sum() - 1) < 1e-5
    return law.ravel()


def sample(llm: LLM, params: SamplingParams, count: int) -> tuple[np.ndarray, int]:
    """Counts of each continuation, and the fewest rounds a sample took with drafts accepted somewhere."""
    cells = np.zeros(VOCAB**TOKENS, dtype=np.int64)
    accepted = 0
    for _ in range(count // (8 * params.n)):
        for out in llm.generate([PROMPT] * 8, params, use_tqdm=False):
            accepted += out.spec.accepted
            for o in out.outputs:
                cells[int(np.ravel_multi_index(o.token_ids, (VOCAB,) * TOKENS))] += 1
    return cells, accepted


def chi_square_p(cells: np.ndarray, law: np.ndarray) -> float:
    """p-value with cells of expectation below 5 pooled."""
    expected = law * cells.sum()
    small = expected < 5
    assert cells[law < 1e-12].sum() == 0, "a continuation of probability zero came out"
    e = np.append(expected[~small], expected[small].sum())
    o = np.append(cells[~small], cells[small].sum())
    keep = e > 0
    assert keep.sum() <= 700
    statistic = float((((o - e) ** 2)[keep] / e[keep]).sum())
    return float(chi2.sf(statistic, int(keep.sum()) - 1))


TREES = {"tree": {"topk": 3, "levels": 2, "total": 7}, "bush": {"topk": 3, "levels": 1, "total": 4}}
"""At most three tokens a round, and at most two: then the six tokens take three rounds and more."""


def build(dirs: dict[str, Path], drafter: str, run_ahead: int, verifier: str = "chain") -> LLM:
    drafter, _, kind = drafter.partition(":")
    draft: Any = {"none": None, "ngram": "ngram", "suffix": "suffix"}.get(drafter, str(dirs.get(drafter)))
    if drafter == "oracle":
        draft = lambda **kw: OracleDrafter(lambda r: [1, 3, 0, 1, 3, 2, 1, 0, 3, 1, 2, 0, 1, 1, 2], **kw)
    options = {"ngram": {"min_n": 1, "gate": False}, "suffix": {"offset": 1.0, "min_prob": 0.0}}
    return LLM(
        model=str(dirs["target"]), draft=draft, run_ahead=run_ahead, max_slots=64, page_size=1, max_model_len=16,
        draft_options=options.get(drafter, {}), verifier=verifier, draft_tree=TREES.get(kind),
        confidence_schedule=kind == "scheduled",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("drafter", "run_ahead", "verifier", "extra"),
    [
        ("none", 1, "chain", {}),
        ("ngram", 1, "chain", {}),
        ("suffix", 2, "chain", {}),
        ("oracle", 2, "chain", {"top_k": 3}),
        ("draft", 1, "chain", {}),
        ("draft", 2, "chain", {"top_p": 0.8, "min_p": 0.05}),
        ("draft", 1, "block", {}),
        ("dflash", 1, "chain", {}),
        ("dflash", 2, "block", {"top_k": 3}),
        ("dspark", 2, "chain", {"top_p": 0.8}),
        ("dspark", 1, "block", {}),
        pytest.param("dspark:scheduled", 1, "chain", {}, marks=pytest.mark.slow),  # test_schedule_distribution is lean
        pytest.param("dspark:scheduled", 2, "block", {"top_p": 0.9}, marks=pytest.mark.slow),
        ("eagle3", 2, "chain", {"top_p": 0.9}),
        ("eagle3-part", 1, "chain", {}),
        ("eagle3", 1, "block", {}),
        ("mtp", 2, "chain", {"top_k": 3}),
        pytest.param("mtp", 1, "block", {}, marks=pytest.mark.slow),  # what differs from EAGLE-3 is no law
        ("eagle3:tree", 2, "chain", {"top_p": 0.9}),
        ("eagle3:bush", 1, "chain", {}),
        ("eagle3-part:tree", 1, "chain", {}),
        ("draft", 2, "chain", ASKED),
        pytest.param("eagle3:tree", 1, "chain", ASKED, marks=pytest.mark.slow),
        pytest.param("dspark", 1, "block", ASKED, marks=pytest.mark.slow),
        pytest.param("ngram", 1, "chain", ASKED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_law_is_the_targets(
    dirs: dict[str, Path], drafter: str, run_ahead: int, verifier: str, extra: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=1.0, n=64, max_tokens=TOKENS, ignore_eos=True, **extra)
    with build(dirs, drafter, run_ahead, verifier) as llm:
        cells, accepted = sample(llm, params, SAMPLES)
        p = chi_square_p(cells, exact_law(llm, params))
        llm.check_idle()
    assert drafter == "none" or accepted > SAMPLES // 4, "the test needs accepted drafts"
    assert p > ALPHA


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_wrong_block_draft_law_is_noticed(
    dirs: dict[str, Path], verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same for a DSpark block, one draft after another."""

    def flat(*args: Any, **kw: Any) -> Any:
        token_B, q_BV = choose(*args, **kw)
        return token_B, None if q_BV is None else (q_BV**0.3) / (q_BV**0.3).sum(1, keepdim=True)

    monkeypatch.setattr("slipstream.draft.dflash.choose", flat)
    params = SamplingParams(temperature=1.0, n=64, max_tokens=TOKENS, ignore_eos=True)
    with build(dirs, "dspark", 1, verifier) as llm:
        cells, _ = sample(llm, params, SAMPLES)
        assert chi_square_p(cells, exact_law(llm, params)) < ALPHA


def test_a_sibling_judged_without_its_elders_is_noticed(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a refused sibling's share is not taken from what is left."""
    monkeypatch.setattr("slipstream.verify.tree.sibling_pairs", lambda rows: rows.parent_BN[:, :, None] < -1)
    params = SamplingParams(temperature=1.0, n=64, max_tokens=TOKENS, ignore_eos=True)
    with build(dirs, "eagle3:tree", 1) as llm:
        cells, _ = sample(llm, params, SAMPLES)
        assert chi_square_p(cells, exact_law(llm, params)) < ALPHA


def test_a_wrong_draft_law_is_noticed(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: drafts sampled from q, judged as if they came from a flatter law."""
    real = StandaloneDrafter._choose

    def flat(self: StandaloneDrafter, *args: Any) -> Any:
        token_B, q_BV = real(self, *args)
        return token_B, None if q_BV is None else (q_BV**0.5) / (q_BV**0.5).sum(1, keepdim=True)

    monkeypatch.setattr(StandaloneDrafter, "_choose", flat)
    params = SamplingParams(temperature=1.0, n=64, max_tokens=TOKENS, ignore_eos=True)
    with build(dirs, "draft", 1) as llm:
        cells, _ = sample(llm, params, SAMPLES)
        assert chi_square_p(cells, exact_law(llm, params)) < ALPHA


@pytest.mark.parametrize("drafter", ["draft", pytest.param("eagle3:tree", marks=pytest.mark.slow)])
def test_drafts_that_later_drafts_do_not_count_are_noticed(
    dirs: dict[str, Path], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: penalties in a row know what the rounds before it brought, but not the drafts before it."""

    def committed_only(tally_SV: Any, slot_R: Any, *rest: Any) -> Any:
        return tally_SV[slot_R]

    monkeypatch.setattr("slipstream.kernels.adjust.row_tallies", committed_only)
    params = SamplingParams(temperature=1.0, n=64, max_tokens=TOKENS, ignore_eos=True, **ASKED)
    with build(dirs, drafter, 1) as llm:
        cells, accepted = sample(llm, params, SAMPLES)
        assert accepted > 0
        assert chi_square_p(cells, exact_law(llm, params)) < ALPHA


LETTERS = "(ab|b[abc]|c[ab]){8}"
AFTER = {0: [1], 1: [0, 1, 2], 2: [0, 1]}
"""What LETTERS allows: pairs of tokens 0, 1 and 2, which are a, b and c; 3 ends a sequence."""


def by_letters(prefix: tuple[int, ...]) -> list[int]:
    if len(prefix) % 2 == 0:
        return [0, 1, 2] if all(prefix[i + 1] in AFTER.get(prefix[i], []) for i in range(0, len(prefix), 2)) else [0]
    return AFTER.get(prefix[-1], [0])


def build_lettered(dirs: dict[str, Path], drafter: str, run_ahead: int) -> tuple[LLM, SamplingParams]:
    pytest.importorskip("llguidance")
    from tokenizers import Tokenizer, decoders, models

    if not (dirs["target"] / "tokenizer.json").exists():
        made = Tokenizer(models.Unigram([(c, -1.0) for c in "abc~"], unk_id=3))
        made.decoder = decoders.Fuse()
        made.save(str(dirs["target"] / "tokenizer.json"))
        (dirs["target"] / "generation_config.json").write_text('{"eos_token_id": 3}')
    return build(dirs, drafter, run_ahead), SamplingParams(
        temperature=1.0, n=64, max_tokens=TOKENS, ignore_eos=True, structured_outputs={"regex": LETTERS}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("drafter", "run_ahead"),
    [
        ("draft", 1),
        pytest.param("ngram", 1, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, marks=pytest.mark.slow),
    ],
)
def test_law_under_a_grammar_is_the_masked_targets(dirs: dict[str, Path], drafter: str, run_ahead: int) -> None:
    """Drafts that the grammar forbids, and those that it forces: neither changes what comes out how often."""
    llm, params = build_lettered(dirs, drafter, run_ahead)
    with llm:
        cells, accepted = sample(llm, params, SAMPLES // 3)
        assert chi_square_p(cells, exact_law(llm, params, by_letters)) > ALPHA
        llm.check_idle()
    assert accepted > SAMPLES // 12


def test_drafts_left_out_for_what_they_are_is_noticed(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a drawn draft that the grammar forbids loses its row, and its place is drawn afresh."""
    from slipstream.text.grammar import GrammarMasks

    along = GrammarMasks._along

    def cut(self: GrammarMasks, drafts: Any, most: int) -> Any:
        found = along(self, drafts, most)
        chain = drafts if found.drafts is None else found.drafts
        if len(chain) and not self._allows(found.rows[len(chain) - 1], chain[-1]):
            return found._replace(rows=found.rows[:-1], drafts=tuple(chain[:-1]))
        return found

    monkeypatch.setattr(GrammarMasks, "_along", cut)
    llm, params = build_lettered(dirs, "draft", 1)
    with llm:
        desk = llm._engine.scheduler.desk
        desk.drafts, desk.laws = True, False
        cells, _ = sample(llm, params, SAMPLES // 3)
        assert chi_square_p(cells, exact_law(llm, params, by_letters)) < ALPHA
