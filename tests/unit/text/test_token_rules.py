"""Allowed tokens and banned words as masks: rows of drafts and trees, beside a grammar, min_tokens, nothing left."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("llguidance")

from slipstream.answers import Limits, prepare
from slipstream.errors import InvalidRequestError, RequestFailedError
from slipstream.structured import RoundMasks
from slipstream.text import Tokenizer
from slipstream.text.grammar import Grammars
from slipstream.text.token_rules import RuledMasks, bad_word_ids
from slipstream.types import Request, SamplingParams
from tests.support.grammar_kit import EOS, VOCAB, WORDS, character_tokenizer, ids, words


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return character_tokenizer(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[EOS])


def opened(grammars: Grammars, stop_ids: tuple[int, ...] = (EOS,), **fields: Any) -> RuledMasks:
    params = SamplingParams(**{"max_tokens": 99, **fields})
    request = Request(request_id="r", prompt_token_ids=(5,), params=params, max_len=100, stop_ids=stop_ids)
    made = grammars.open(request)
    assert isinstance(made, RuledMasks)
    return made


def answer(masks: RuledMasks, outputs: str = "", drafts: str = "", parents: Any = None, most: int = 0) -> RoundMasks:
    masks.ask(ids(outputs), ids(drafts), range(len(drafts)) if parents is None else parents, most)
    end = time.monotonic() + 20
    while (found := masks.poll()) is None:
        assert time.monotonic() < end
    return found


def test_only_allowed_tokens(grammars: Grammars) -> None:
    found = answer(opened(grammars, allowed_token_ids=ids("abc")), "xyz", "qa")
    assert found.drafts is None and [words(r) for r in found.rows] == [{"a", "b", "c"}] * 3


def test_a_word_is_banned_by_its_last_token(grammars: Grammars) -> None:
    masks = opened(grammars, bad_word_ids=[ids("abc"), ids("q"), ids("bd")], allowed_token_ids=ids("abcdq"))
    assert [words(r) for r in answer(masks, "", "abc").rows] == [
        set("abcd"), set("abcd"), set("ab"), set("abcd"),
    ]  # fmt: skip
    assert words(answer(masks, "xxab").rows[0]) == set("ab"), "behind what was said before"
    assert words(answer(masks, "xbx").rows[0]) == set("abcd")
    tree = answer(masks, "a", "bcd", parents=[0, 0, 1])  # a b, a c, a b d
    assert [words(r) for r in tree.rows] == [set("abcd"), set("ab"), set("abcd"), set("abcd")]


def test_min_tokens_wins_unless_only_the_end_is_left(grammars: Grammars) -> None:
    masks = opened(grammars, allowed_token_ids=[*ids("a"), EOS], min_tokens=3)
    assert [words(r) for r in answer(masks, "a", "aaa").rows] == [{"a"}, {"a"}, {"a", "</s>"}, {"a", "</s>"}]
    assert words(answer(opened(grammars, allowed_token_ids=[EOS], min_tokens=3)).rows[0]) == {"</s>"}


def test_beside_a_grammar(grammars: Grammars) -> None:
    masks = opened(grammars, structured_outputs={"regex": "[abc]x[2-9]{2}y"}, bad_word_ids=[ids("b"), ids("x3")])
    found = answer(masks, "", "ax3")
    assert [words(r) for r in found.rows] == [{"a", "c"}, {"x"}, set("2456789"), set("23456789")]
    assert words(answer(masks, "ax2").rows[0]) == set("23456789")
    forced = answer(masks, "ax22", "q", most=2)
    assert forced.drafts == (WORDS.index("y"), EOS)
    assert [words(r) for r in forced.rows] == [{"y"}, {"</s>"}, {"</s>"}]


def test_nothing_is_left(grammars: Grammars) -> None:
    with pytest.raises(RequestFailedError, match="leave no token"):
        answer(opened(grammars, allowed_token_ids=ids("a"), bad_word_ids=[ids("a")]))
    with pytest.raises(RequestFailedError, match="leave no token beside the grammar"):
        answer(opened(grammars, structured_outputs={"regex": "ab"}, allowed_token_ids=ids("b")))


def test_words_are_tokenized_where_a_request_comes_in(grammars: Grammars, tokenizer: Tokenizer) -> None:
    assert set(bad_word_ids(tokenizer, ["ab"])) >= {tuple(tokenizer.encode("ab", add_special_tokens=False))}
    limits = Limits(vocab_size=VOCAB, max_model_len=50, eos_ids=(EOS,), max_stop_ids=8, num_drafts=0)
    made = prepare([5], SamplingParams(bad_words=["q"]), tokenizer, limits, grammars)
    assert tuple(ids("q")) in made.params.bad_word_ids and not made.params.bad_words
    for fields, says in (
        ({"allowed_token_ids": [VOCAB]}, "below the vocabulary"),
        ({"bad_word_ids": [[1, VOCAB]]}, "bad_word_ids"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            prepare([5], SamplingParams(**fields), tokenizer, limits, grammars)
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        prepare([5], SamplingParams(bad_words=["q"]), Tokenizer.absent(), limits, grammars)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": "ab"}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1"), ({"allowed_token_ids": [1] * 16385}, "limit is 16384"),
        ({"bad_words": "ab"}, "list of texts"), ({"bad_words": [""]}, "non-empty"), ({"bad_words": [1]}, "bad_words 1"),
        ({"bad_words": ["a"] * 257}, "limit is 256"), ({"bad_words": ["a" * 257]}, "257 characters"),
        ({"bad_word_ids": [[]]}, "one of 0 ids"), ({"bad_word_ids": [[-1]]}, "bad_word_ids=-1"),
    ],
)  # fmt: skip
def test_limits(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        SamplingParams(**fields)
