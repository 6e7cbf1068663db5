"""Structured output: speculative equals plain under a grammar, token for token; always an instance of the schema."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")

from slipstream import LLM, SamplingParams
from slipstream.draft.oracle import OracleDrafter
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.equality_cells import TREE
from tests.support.grammar_kit import EOS, VOCAB, GrammarReference, character_models, instance, random_schema
from tests.support.mtp import write_mtp
from tests.support.pairwise import pairwise
from tests.support.reference import planted_oracle
from tests.support.tree_oracle import oracle_tree

FACTORS: dict[str, Any] = {
    "drafter": ("none", "ngram", "oracle", "draft", "oracle-tree"),
    "sampling": ("greedy", "seeded"),
    "run_ahead": (1, 2, 8),
    "event": ("none", "preempt", "abort", "n"),
}
MAX_TOKENS = 28


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return character_models(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> GrammarReference:
    llm = LLM(model=str(dirs["target"]), dtype="float64", device="cpu")
    return GrammarReference(llm._built.model, llm.tokenizer)


def engine(dirs: dict[str, Path], drafter: str, reference: GrammarReference, **options: Any) -> LLM:
    oracle = planted_oracle(
        lambda r: reference.continuation(r.prompt_token_ids, r.params, r.child), vocab=VOCAB, seed=3
    )
    tree = TREE if drafter == "oracle-tree" else None
    known = {"none": None, "ngram": "ngram", "draft": str(dirs["draft"])}
    draft: Any = {**known, "oracle": oracle, "oracle-tree": oracle_tree(oracle)}[drafter]
    return LLM(
        model=str(dirs["target"]), draft=draft, num_drafts=3 if draft is not None and tree is None else None,
        draft_tree=tree, dtype="float64", device="cpu", **options,
    )  # fmt: skip


def law(kind: str, i: int) -> dict[str, Any]:
    return {"temperature": 0} if kind == "greedy" else {"temperature": 0.8, "seed": 100 + i, "top_k": 40}


SPECS: list[dict[str, Any]] = [
    {"json": random_schema(random.Random(4))},
    {"regex": "(ab|[0-9]{2,4}x)+ true"},
    {"json": random_schema(random.Random(11))},
    {"choice": ["abacus", "ab10", "true love"]},
    {"grammar": 'root ::= "{" item ("," item)* "}"\nitem ::= [a-c] [0-9]'},
    {"json_object": True},
]


@pytest.mark.parametrize("cell", pairwise(FACTORS, seed=1), ids=lambda c: "-".join(str(v) for v in c.values()))
def test_speculative_equals_plain(cell: dict[str, Any], dirs: dict[str, Path], reference: GrammarReference) -> None:
    rng = random.Random(str(cell))
    n = 2 if cell["event"] == "n" else 1
    prompts = [tuple(rng.randrange(5, VOCAB) for _ in range(rng.randrange(1, 12))) for _ in range(5)]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, n=n, structured_outputs=SPECS[(i + rng.randrange(6)) % 6] if i % 3 < 2 else None,
            ignore_eos=i % 3 == 2, **law(cell["sampling"], i),
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    pages = {"num_pages": 9} if cell["event"] == "preempt" else {}
    llm = engine(
        dirs, cell["drafter"], reference, run_ahead=cell["run_ahead"], max_model_len=48, page_size=8, max_slots=8,
        prefill_chunk=16, **pages,
    )  # fmt: skip
    if cell["event"] == "abort":
        victim = llm.stream(list(prompts[0]), params[0])
        next(victim)
        other = llm.stream(list(prompts[1]), params[1])
        next(other)
        victim.close()
        other.close()
    outs = llm.generate([list(p) for p in prompts], params)
    for prompt, s, out in zip(prompts, params, outs, strict=True):
        for child, one in enumerate(out.outputs):
            want = reference.continuation(prompt, s, child)
            assert one.token_ids == want, s.structured_outputs
            assert one.finish_reason == ("stop" if want[-1] == EOS and not s.ignore_eos else "length")
    if cell["drafter"] == "oracle":
        assert outs[0].spec.accepted + outs[1].spec.accepted > 0
    llm.check_idle()


@pytest.mark.parametrize("run_ahead", [1, 8])
def test_drafts_past_the_end_of_an_object(run_ahead: int, dirs: dict[str, Path], reference: GrammarReference) -> None:
    """S36: drafts go on behind the last brace, or break the object in its middle: they are refused, nothing else."""
    spec = {"json": SPECS[0]["json"], "disable_any_whitespace": True}
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=spec)
    want = reference.continuation((7, 8), params)

    def script(request: Any) -> list[int]:
        right = [*request.prompt_token_ids, *want[:-1], *[60] * 20]
        return [t if i % 5 else 127 for i, t in enumerate(right)]

    llm = LLM(
        model=str(dirs["target"]), draft=lambda **kw: OracleDrafter(script, **kw), num_drafts=6, dtype="float64",
        device="cpu", run_ahead=run_ahead, max_model_len=128,
    )  # fmt: skip
    outs = llm.generate([[7, 8]] * 3, [params, replace(params, min_tokens=50), replace(params, ignore_eos=True)])
    assert [o.outputs[0].finish_reason for o in outs] == ["stop", "stop", "length"]
    assert [o.outputs[0].token_ids for o in outs[:2]] == [want] * 2, "min_tokens yields to a grammar that is complete"
    assert outs[2].outputs[0].token_ids == want + [EOS] * (60 - len(want))
    assert all(json.loads(o.outputs[0].text) == json.loads(outs[0].outputs[0].text) for o in outs)
    llm.check_idle()


@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 1.3, "seed": 4}, {"temperature": 1.3}])
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_forced_text_is_drafted(
    run_ahead: int, law: dict[str, Any], dirs: dict[str, Path], reference: GrammarReference
) -> None:
    """An n-gram drafter finds nothing in new text; the grammar knows most of it."""
    regex = "the (quick|lazy) vixen jumps [0-9] times!"
    llm = engine(dirs, "ngram", reference, run_ahead=run_ahead, max_model_len=64)
    params = SamplingParams(max_tokens=50, structured_outputs={"regex": regex}, **law)
    [out] = llm.generate([[9, 40]], params)
    text = llm.tokenizer.decode(out.outputs[0].token_ids)
    assert re.fullmatch(regex, text) and out.outputs[0].finish_reason == "stop"
    assert out.spec.rounds <= len(out.outputs[0].token_ids) / 2.5
    assert out.spec.drafted - out.spec.accepted <= 6
    if "seed" in law or law["temperature"] == 0:
        assert out.outputs[0].token_ids == reference.continuation((9, 40), params)
    llm.check_idle()


@pytest.mark.parametrize(("drafter", "run_ahead"), [("oracle", 1), ("draft", 2), ("oracle-tree", 8)])
def test_preempted_in_the_middle_of_a_grammar(
    drafter: str, run_ahead: int, dirs: dict[str, Path], reference: GrammarReference
) -> None:
    """Room for one sequence and a half: whoever leaves goes on from where its grammar was."""
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs={"regex": "([a-z]{2}[0-9]){12}!"})
    prompts = [[5 + i, 60 - i, 40] for i in range(4)]
    llm = engine(dirs, drafter, reference, run_ahead=run_ahead, max_model_len=48, page_size=4, num_pages=24)
    outs = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outs] == [reference.continuation(tuple(p), params) for p in prompts]
    assert llm.stats()["counters"]["preemptions"] > 0
    llm.check_idle()


@pytest.mark.parametrize(
    ("after", "drafter", "run_ahead"),
    [("</think>", "none", 1), ("</think>", "oracle", 2), ("a!", "oracle", 1), ("a!", "oracle-tree", 2)],
)
def test_masks_switch_where_reasoning_ends(
    after: str, drafter: str, run_ahead: int, dirs: dict[str, Path], reference: GrammarReference
) -> None:
    """S35: the end of the reasoning, one token or several, stands anywhere in a window of drafts."""
    params = [
        SamplingParams(
            temperature=1.0, seed=s, max_tokens=40, logit_bias={4: 2} if after == "</think>" else {70: 5, 6: 5},
            structured_outputs={"regex": "(ab|[0-9]{2}){3,4};", "after": after},
        )
        for s in range(8)
    ]  # fmt: skip
    llm = engine(dirs, drafter, reference, run_ahead=run_ahead, max_model_len=64)
    outs = llm.generate([[9]] * 8, params)
    want = [reference.continuation((9,), s) for s in params]
    assert [o.outputs[0].token_ids for o in outs] == want
    texts = [llm.tokenizer.decode(o.outputs[0].token_ids, skip_special_tokens=False) for o in outs]
    behind = [t.split(after, 1)[1] for t in texts if after in t]
    assert sum(bool(re.fullmatch(r"(ab|[0-9]{2}){3,4};</s>", t)) for t in behind) >= 2, texts
    llm.check_idle()


OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("suffix", {"draft": "suffix"}, {"temperature": 0}),
    ("adaptive", {"draft": "ngram", "adaptive": True}, {"temperature": 0.9, "seed": 3}),
    ("buckets", {"draft": "ngram", "slot_buckets": (2, 4, 8, 16), "row_tiers": (1, 2, 4)}, {"temperature": 0}),
    ("eagle3", {}, {"temperature": 0.9, "seed": 3}),
    ("eagle3", {"draft_tree": TREE, "num_drafts": None}, {"temperature": 0}),
    ("dflash", {}, {"temperature": 0}),
    ("dspark", {"verifier": "block"}, {"temperature": 0.9, "seed": 3}),
    ("dspark", {"confidence_schedule": True}, {"temperature": 0}),
    ("mtp", {}, {"temperature": 0.9, "seed": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("drafter", "options", "law"), OTHERS, ids=range(len(OTHERS)))
def test_other_drafters(
    drafter: str, options: dict[str, Any], law: dict[str, Any], dirs: dict[str, Path], reference: GrammarReference,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = {
        "eagle3": lambda: write_eagle3(tmp_path / "d", dirs["target"], draft_vocab=60),
        "dflash": lambda: write_block_draft(tmp_path / "d", dirs["target"], "dflash"),
        "dspark": lambda: write_block_draft(tmp_path / "d", dirs["target"], "dspark", head="gated"),
        "mtp": lambda: write_mtp(tmp_path / "d", dirs["target"], seed=5),
    }
    draft = str(made[drafter]()) if drafter in made else None
    llm = LLM(
        model=str(dirs["target"]), dtype="float64", device="cpu", run_ahead=2, max_model_len=64, max_slots=16,
        **{"draft": draft, "num_drafts": 3, **options},
    )  # fmt: skip
    params = [
        SamplingParams(max_tokens=20, structured_outputs=spec, ignore_eos=spec is None, **law)
        for spec in (*SPECS[:3], None)
    ]
    outs = llm.generate([[9, 20 + i] for i in range(4)], params)
    assert [o.outputs[0].token_ids for o in outs] == [
        reference.continuation((9, 20 + i), s) for i, s in enumerate(params)
    ]
    llm.check_idle()


def _valid(dirs: dict[str, Path], reference: GrammarReference, schemas: int, seed: int) -> None:
    """Random schemas through every kind of drafter and law; unseeded sampling too, by rejection."""
    rng = random.Random(seed)
    for drafter in ("ngram", "draft", "oracle-tree"):
        llm = engine(dirs, drafter, reference, run_ahead=rng.choice((1, 2)), max_model_len=256)
        given = [random_schema(rng) for _ in range(schemas)]
        laws = [
            ({"temperature": 0}, {"temperature": 1.5, "seed": i}, {"temperature": 1.5})[i % 3] for i in range(schemas)
        ]
        params = [
            SamplingParams(
                max_tokens=240, structured_outputs={"json": s, "disable_any_whitespace": True}, **x  # type: ignore[arg-type]
            )
            for s, x in zip(given, laws, strict=True)
        ]  # fmt: skip
        outs = llm.generate([[5 + i % 90] for i in range(schemas)], params)
        for schema, out in zip(given, outs, strict=True):
            assert out.outputs[0].finish_reason == "stop"
            assert instance(out.outputs[0].text, schema), (out.outputs[0].text, schema)
        llm.check_idle()


def test_answers_are_instances(dirs: dict[str, Path], reference: GrammarReference) -> None:
    _valid(dirs, reference, 8, 3)


@pytest.mark.slow
def test_answers_are_instances_of_a_hundred_schemas(dirs: dict[str, Path], reference: GrammarReference) -> None:
    _valid(dirs, reference, 100, 4)
