"""Grammars as masks: what a row allows, drafts and trees of them, limits on time and size, faults."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from slipstream.errors import InvalidRequestError, RequestFailedError, UnsupportedError
from slipstream.structured import MAX_CHARS, MAX_DEPTH, MaskRows, RoundMasks, StructuredOutputsParams
from slipstream.text import Tokenizer
from slipstream.text.grammar import THREADS, GrammarMasks, Grammars
from slipstream.types import Request, SamplingParams
from tests.support.grammar_kit import EOS, VOCAB, WORDS, character_tokenizer, ids, words
from tests.support.hostile_grammars import hostile

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return character_tokenizer(tmp_path_factory.mktemp("characters"))


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[EOS])


def opened(grammars: Grammars, stop_ids: Sequence[int] = (EOS,), **spec: Any) -> GrammarMasks:
    fields = {k: spec.pop(k) for k in ("min_tokens", "max_tokens") if k in spec}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**spec), **{"max_tokens": 99, **fields})
    request = Request(request_id="r", prompt_token_ids=(5,), params=params, max_len=100, stop_ids=tuple(stop_ids))
    return grammars.open(request)


def rows(masks: GrammarMasks, outputs: str | list[int] = "", drafts: Any = "", parents: Any = None) -> MaskRows:
    return answer(masks, outputs, drafts, parents).rows


def answer(
    masks: GrammarMasks, outputs: str | list[int] = "", drafts: Any = "", parents: Any = None, most: int = 0
) -> RoundMasks:
    given = ids(drafts) if isinstance(drafts, str) else drafts
    outputs = ids(outputs) if isinstance(outputs, str) else outputs
    masks.ask(outputs, given, range(len(given)) if parents is None else parents, most)
    end = time.monotonic() + 20
    while (found := masks.poll()) is None:
        assert time.monotonic() < end
        masks._owner.wait(0.01)
    return found


def test_a_row_per_draft(grammars: Grammars) -> None:
    masks = opened(grammars, regex="[ax]b(c|d)[0-9]")
    found = rows(masks, "", "abc1")
    assert [words(r) for r in found] == [{"a", "ab", "x"}, {"b"}, {"c", "d"}, set("0123456789"), {"</s>"}]
    # Rejections: fewer of them came true, and another one.
    assert [words(r) for r in rows(masks, "abd", "7")] == [set("0123456789"), {"</s>"}]
    assert words(rows(masks, "abd9")[0]) == {"</s>"}


def test_behind_a_forbidden_draft_nothing_is_looked_at(grammars: Grammars) -> None:
    masks = opened(grammars, regex="[ax]b(c|d)[0-9]")
    found = rows(masks, "", [WORDS.index("a"), WORDS.index("x"), 127, -1, 10_000])
    assert [words(found[0]), words(found[1])] == [{"a", "ab", "x"}, {"b"}]
    assert (found[2:] == -1).all()


def test_a_tree_of_drafts(grammars: Grammars) -> None:
    masks = opened(grammars, regex="a(b[01]|c[23])")
    drafts = ids("abc") + ids("23") + ids("0")
    found = rows(masks, "", drafts, [0, 1, 1, 3, 3, 2])
    want = [{"a", "ab"}, {"b", "c"}, {"0", "1"}, {"2", "3"}, {"</s>"}, {"</s>"}, {"</s>"}]
    assert [words(r) for r in found] == want
    assert words(rows(masks, "ac")[0]) == {"2", "3"}


@pytest.mark.parametrize(
    ("outputs", "drafts", "most", "want"),
    [
        ("", "", 3, None),  # a choice comes first
        ("a", "", 3, "bcd"),  # forced text, which nobody drafted
        ("a", "", 2, "bc"),
        ("a", "xyz", 3, "bcd"),
        ("a", "bcd", 3, None),
        ("a", "bcd2", 4, None),  # the drafter's choice behind it
        ("a", "bcdx", 4, None),  # one that is forbidden is judged
        ("a", "bqd2", 4, "bcd"),
        ("", "qbc", 4, "q"),  # nothing behind a forbidden one
        ("abcd2", "", 4, "</s>"),
        ("", "a", 4, "abcd"),
        ("", "abcd3", 3, "abc"),
    ],
)
def test_what_the_grammar_forces_is_drafted(
    grammars: Grammars, outputs: str, drafts: str, most: int, want: str | None
) -> None:
    masks = opened(grammars, regex="[ax]bcd[0-9]")
    found = answer(masks, outputs, drafts, most=most)
    chain = ids(drafts) if want is None else [EOS] if want == "</s>" else ids(want)
    assert found.drafts == (None if want is None else tuple(chain))
    plain = opened(grammars, regex="[ax]bcd[0-9]")
    assert (found.rows == rows(plain, outputs, chain)).all()
    assert (rows(masks, outputs, chain) == found.rows).all(), "it is where it was"


def test_min_tokens_is_in_the_masks_and_yields_to_the_grammar(grammars: Grammars) -> None:
    masks = opened(grammars, regex="[ax]b?c?", min_tokens=4)
    assert [words(r) for r in rows(masks, "", "abc")] == [{"a", "ab", "x"}, {"b", "c"}, {"c"}, {"</s>"}]
    other = opened(grammars, regex="[ab]*", min_tokens=2, stop_ids=(EOS, WORDS.index("b")))
    assert [words(r) for r in rows(other, "", "aa")] == [{"a", "ab"}, {"a", "ab"}, {"a", "b", "ab", "</s>"}]


def test_after_the_end_more_ends_may_follow(grammars: Grammars) -> None:
    """ignore_eos: the request goes on, the grammar has nothing more to say."""
    masks = opened(grammars, regex="a", stop_ids=())
    assert [words(r) for r in rows(masks, "", [*ids("a"), EOS, EOS])] == [{"a"}, *[{"</s>"}] * 3]
    assert words(rows(masks, [*ids("a"), EOS, EOS], [EOS])[1]) == {"</s>"}


@pytest.mark.parametrize("after", ["</think>", "b!"])
def test_nothing_is_masked_before_the_reasoning_ends(grammars: Grammars, after: str) -> None:
    end = [WORDS.index(after)] if after in WORDS else ids(after)
    masks = opened(grammars, regex="[0-9]x", after=after)
    found = rows(masks, "", [*ids("q"), *end, *ids("\n"), *ids("5")])
    free = 1 + len(end)
    assert (found[:free] == -1).all()
    assert words(found[free]) == set("0123456789")
    assert (found[free + 1 :] == -1).all(), "white space behind it is not the grammar's"
    assert words(rows(masks, [*ids("q"), *end, *ids("5")])[0]) == {"x"}


def test_what_ends_an_answer_is_never_its_text(tokenizer: Tokenizer) -> None:
    """An end token that is no special one: going back over it as a draft left the grammar a word too far."""
    made = Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[WORDS.index("q")])
    masks = opened(made, stop_ids=(), regex="([qa]b){2,3}")
    assert words(rows(masks)[0]) == {"a", "ab"}
    assert [words(r) for r in rows(masks, "ab", "abq")] == [{"a", "ab"}, {"b"}, {"a", "ab", "q"}, {"q"}]
    assert [words(r) for r in rows(masks, "abab", "ab")] == [{"a", "ab", "q"}, {"b"}, {"q"}]


def test_schemas_and_copies(grammars: Grammars) -> None:
    one, two = (opened(grammars, json=SCHEMA, disable_any_whitespace=True) for _ in range(2))
    assert words(rows(one)[0]) == words(rows(two)[0]) == {'{"'}, "forced text is written as the tokenizer writes it"
    assert words(rows(one, '{"a":')[0]) == {"t", "f", "true", "false"}
    assert words(rows(two, '{"a":f')[0]) == {"a"}
    assert len(grammars._compiled) == 1, "copies share what is compiled"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "regex"), ({"grammar": "start: b"}, "grammar"), ({"grammar": "root ::= x"}, "grammar"),
    ({"json": {"type": "bogus"}}, "json"), ({"json": {"$ref": "#/nowhere"}}, "json"), ({"regex": "é"}, "no token"),
    ({"grammar": "start: a\na[max_tokens=5]: /.*/"}, "rollback not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "says"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_compiled_says_why(grammars: Grammars, spec: dict[str, Any], says: str) -> None:
    for _ in range(2):  # the second is known already
        with pytest.raises(InvalidRequestError, match=says) as caught:
            grammars.check(StructuredOutputsParams(**spec))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(InvalidRequestError, match=says):
        rows(opened(grammars, **spec))
    assert words(rows(opened(grammars, regex="a"))[0]) == {"a"}, "others are not affected"


DEEP: Any = {}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"items": DEEP}
SPECS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"), ({"regex": "a", "json": {}}, "exactly one"), ({"regex": 5}, "regex=5"),
    ({"regex": ""}, "exactly|regex"),
    ({"regex": "a" * 10_000}, "limit is 8192"), ({"grammar": "a" * (MAX_CHARS + 1)}, f"limit is {MAX_CHARS}"),
    ({"json": DEEP}, f"more than {MAX_DEPTH} levels"), ({"json": "x"}, "not valid JSON"), ({"json": [1]}, "object"),
    ({"json": {"enum": ["a" * MAX_CHARS]}}, f"limit is {MAX_CHARS}"), ({"json": {"x": float("nan")}}, "JSON"),
    ({"json": "[" * 100_000}, "characters|JSON"), ({"json": {"x": {1, 2}}}, "JSON cannot"),
    ({"choice": []}, "choice"), ({"choice": "ab"}, "choice"), ({"choice": ["a", 1]}, "choice 1"),
    ({"choice": [""]}, "non-empty"),
    ({"choice": ["a"] * 1025}, "limit is 1024"), ({"choice": ["\ud800"]}, "surrogate"),
    ({"json_object": "yes"}, "json_object"),
    ({"regex": "a", "after": "x" * 300}, "limit is 256"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "says"), SPECS, ids=range(len(SPECS)))
def test_limits(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        StructuredOutputsParams(**spec)
    with pytest.raises(InvalidRequestError, match=says):
        SamplingParams(structured_outputs=spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["whitespace_pattern", "structural_tag", "disable_additional_properties"])
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        StructuredOutputsParams(regex="a", **{name: "x"})  # type: ignore[arg-type]


def test_a_slow_grammar_ends_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes too long: an error for its request, in time; the thread goes on, others compile beside it."""
    held, build = threading.Event(), Grammars._build

    def slow(self: Grammars, spec: StructuredOutputsParams) -> Any:
        if spec.regex == "slow":
            held.wait(60)
        return build(self, spec)

    monkeypatch.setattr(Grammars, "_build", slow)
    grammars = Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[EOS], compile_seconds=0.2)
    try:
        with pytest.raises(InvalidRequestError, match=r"takes more than 0\.2 s"):
            grammars.check(StructuredOutputsParams(regex="slow"))
        masks = opened(grammars, regex="slow")
        with pytest.raises(RequestFailedError, match=r"more than 0\.2 s"):
            rows(masks)
        grammars.compile_seconds = 20.0
        assert words(rows(opened(grammars, regex="ab"))[0]) == {"ab"}
    finally:
        held.set()


def test_threads_that_do_not_come_back_are_replaced(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread compiles something endless: what waits behind is refused in time, and compiled when asked again."""
    held, build = threading.Event(), Grammars._build

    def slow(self: Grammars, spec: StructuredOutputsParams) -> Any:
        if str(spec.regex).startswith("slow"):
            held.wait(60)
        return build(self, spec)

    monkeypatch.setattr(Grammars, "_build", slow)
    grammars = Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[EOS], compile_seconds=0.2)
    grammars.require()
    stuck = [StructuredOutputsParams(regex=f"slow{i}") for i in range(THREADS)]
    behind = StructuredOutputsParams(regex="ab")
    try:
        for spec in stuck:
            grammars.compiled(spec)
        with pytest.raises(InvalidRequestError, match=r"takes more than 0\.2 s"):
            grammars.check(behind)
        with pytest.raises(InvalidRequestError, match=r"takes more than 0\.2 s"):
            grammars.check(stuck[0])
        grammars.compile_seconds = 20.0
        grammars.check(behind)
    finally:
        held.set()


LARGE: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a{1000000}"}, "make 1000000 characters; the limit is 20000"),
    ({"regex": "((ab){100}){101}"}, "make 20200 "),
    ({"regex": r"\{9{9}[{9}]{30000}"}, "make 30010 "),
    ({"regex": "(?x)a { 20, 30000 }"}, "make 30002 "),
    ({"regex": "x{" + "9" * 40 + "}"}, "more than"),
    ({"json": {"type": "string", "pattern": "^(a{300}){300}$"}}, "json: .* 90000 "),
    ({"json": {"patternProperties": {"b{15000}": {"pattern": "a{15000}"}}}}, "json: .* 30000 "),
    ({"json": {"properties": {"const": {"pattern": "a{30000}"}}}}, "json: .* 30000 "),
    ({"json": {"type": "array", "items": {"minLength": 10**12}}}, "minLength=1000000000000 is above .* 2147483647"),
    ({"grammar": "start: A\nA: B{1000}\nB: C~2..30 | C\nC: \"x\""}, "grammar: .* 31032 "),
    ({"grammar": "start: a\na: /b{99999}/"}, "grammar: .* 99999 "),
    ({"grammar": 'start: "x" a\na: %json {"pattern": "a{99999}"}'}, "grammar: .* 99999 "),
    ({"grammar": 'root ::= a{200}\na ::= "ab"{200} | [x]'}, "grammar: .* "),
    ({"grammar": 'start: a\na: %json {"maxItems": 1e99}'}, "grammar: maxItems=1e.99 is above"),
    ({"grammar": '%llguidance {"no\\u005fforcing": false}\nstart: /a/'}, "no_forcing"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "says"), LARGE, ids=range(len(LARGE)))
def test_repeats_are_counted_before_anything_is_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], says: str
) -> None:
    grammars.require()
    monkeypatch.setattr(grammars._library, "LLMatcher", type("Never", (), {}))
    with pytest.raises((InvalidRequestError, UnsupportedError), match=says):
        grammars.check(StructuredOutputsParams(**spec))


@pytest.mark.parametrize(
    "spec",
    [
        {"regex": "a{20000}"},
        {"regex": r"[{99999}]\p{Greek}*|\x{41}b{30}"},
        {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "minItems": 10**9}},
        {"grammar": 'start: a{1000000}\na: "x" | "y" // A: "x"{1000000}'},
        {"json": {"enum": [{"pattern": "a{99999}", "minItems": 10**12}, 1]}},
        {"grammar": "start: A{500}\nA: /[ab]/{1,500} B\nB: /c/"},
    ],
    ids=str,
)
def test_what_is_not_written_out_has_no_such_limit(grammars: Grammars, spec: dict[str, Any]) -> None:
    grammars.check(StructuredOutputsParams(**spec))


@pytest.mark.parametrize(
    "spec",
    [
        {"grammar": 'start: "a" b\nb: /x+/ "x"'},  # without end: the first lexeme takes every x
        {"grammar": 'start: "a" b{100000}\nb: A\nA: "x"{10000}'},
        {"json": {"type": "array", "items": {"const": "a" * 9999}, "minItems": 10**6}, "disable_any_whitespace": True},
    ],
    ids=range(3),
)  # fmt: skip
def test_text_without_a_choice_is_not_followed_for_ever(grammars: Grammars, spec: dict[str, Any]) -> None:
    masks, outputs = opened(grammars, **spec), list[int]()
    began = time.process_time()
    for _ in range(3):
        row = rows(masks, outputs)[0]
        outputs = [*outputs, int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[-1])]
    assert time.process_time() - began < 5


@pytest.mark.parametrize("length", [2000, 3000])
@pytest.mark.parametrize("kind", ["regex", "choice", "json", "own", "flat"])
def test_long_text_without_a_choice_is_not_followed(grammars: Grammars, kind: str, length: int) -> None:
    """Making it tokens holds the interpreter's lock for every mask."""
    text = "ab" * (length // 2)
    fields: dict[str, dict[str, Any]] = {
        "regex": {"regex": text}, "choice": {"choice": [text]}, "json": {"json": {"const": text}},
        "own": {"grammar": 'start: "x" | %json ' + json.dumps({"const": text}), "own": True},
        "flat": {"json": {"type": "array", "items": {"const": "ab"}, "minItems": length // 9, "maxItems": length},
                 "disable_any_whitespace": True},
    }  # fmt: skip
    masks = opened(grammars, **fields[kind])
    start = {"regex": "", "choice": "", "json": '"', "own": '"', "flat": '["'}[kind]
    assert words(rows(masks, start)[0]) == ({"ab"} if length == 2000 else {"a", "ab"})


def test_own_grammars_are_followed_and_no_client_can_say_so(grammars: Grammars) -> None:
    text = 'start: "{" /"a"/ ":" ("true" | "false")'
    assert words(rows(opened(grammars, grammar=text, own=True))[0]) == {'{"'}
    assert words(rows(opened(grammars, grammar=text))[0]) == {"{", '{"'}
    answer = 'start: %json {"const": {"a": 1}, "x-guidance": {"whitespace_flexible": false}}'  # a client's schema
    assert words(rows(opened(grammars, grammar=answer, own=True))[0]) == {"{", '{"'}
    with pytest.raises(InvalidRequestError, match="unknown key 'own'"):
        StructuredOutputsParams.of({"grammar": text, "own": True})


def test_a_token_against_the_grammar_is_an_error_of_the_request(grammars: Grammars) -> None:
    masks = opened(grammars, regex="ab")
    rows(masks)
    with pytest.raises(RequestFailedError, match="the grammar"):
        rows(masks, "x")


def test_without_the_library_or_a_tokenizer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StructuredOutputsParams(regex="a")
    for made, says in (
        (Grammars(Tokenizer.absent(), vocab_size=9, eos_ids=[EOS]), "needs a tokenizer"),
        (Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[]), "end-of-sequence"),
        (Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[EOS], unavailable="not here"), "not here"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            made.check(spec)
        with pytest.raises(UnsupportedError, match=says):
            rows(opened(made, regex="a"))
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"slipstream\[grammar\]"):
        Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[EOS]).check(spec)


def _survives(grammars: Grammars, seeds: range) -> None:
    """Compiles or is refused, gives masks or ends with an error, and neither takes long."""
    ran = 0
    for seed in seeds:
        rng, began = random.Random(seed), time.monotonic()
        try:
            masks = opened(grammars, **hostile(rng))
            outputs: list[int] = []
            for _ in range(4):
                row = rows(masks, outputs, [rng.randrange(VOCAB) for _ in range(3)])[0]
                bits = np.unpackbits(row.view(np.uint8), bitorder="little")
                outputs = [*outputs, int(rng.choice(list(np.nonzero(bits)[0])))]
            ran += 1
        except (InvalidRequestError, RequestFailedError, UnsupportedError) as error:
            assert "Panic" not in str(error), (seed, error)
        assert time.monotonic() - began < 10, seed
    assert ran > len(seeds) // 4


def test_hostile_grammars(grammars: Grammars) -> None:
    _survives(grammars, range(150))


@pytest.mark.soak
def test_many_hostile_grammars(grammars: Grammars) -> None:
    _survives(grammars, range(150, 20_000))


def test_many_choices(grammars: Grammars) -> None:
    masks = opened(grammars, choice=[f"ab{i}x" for i in range(1024)])
    assert words(rows(masks, "ab10")[0]) == {"x", "10", *"0123456789"}


def test_a_panic_of_the_library_ends_one_request(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    build, consume = Grammars._build, GrammarMasks._consume

    def broken(self: Grammars, spec: StructuredOutputsParams) -> Any:
        if spec.regex == "bad":
            raise Panic
        return build(self, spec)

    def falls(self: GrammarMasks, token: int) -> int:
        if token == WORDS.index("q"):
            raise Panic
        return consume(self, token)

    monkeypatch.setattr(Grammars, "_build", broken)
    monkeypatch.setattr(GrammarMasks, "_consume", falls)
    grammars = Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[EOS])
    with pytest.raises(InvalidRequestError, match="Panic"):
        grammars.check(StructuredOutputsParams(regex="bad"))
    with pytest.raises(RequestFailedError, match="the grammar failed: Panic"):
        rows(opened(grammars, regex="[qa]"), "q")
    assert words(rows(opened(grammars, regex="[qa]"))[0]) == {"q", "a"}
