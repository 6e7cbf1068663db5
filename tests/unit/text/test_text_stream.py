"""Incremental text equals whole text, and stop strings do not depend on how tokens arrive."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.errors import InvalidRequestError
from slipstream.text import IncrementalDetokenizer, StopStringChecker, TextStream, Tokenizer
from tests.support.text_kit import byte_level_metadata, spm_metadata

BYTE_LEVEL = Tokenizer.from_gguf(byte_level_metadata())
SPM = Tokenizer.from_gguf(spm_metadata())
TOKENIZERS = [BYTE_LEVEL, SPM]

token_ids = st.lists(st.integers(0, 320), max_size=40)


def chunked(ids, cuts):
    """`ids` in pieces that end at the given places (modulo the length)."""
    at = sorted({c % (len(ids) + 1) for c in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(at)]


@settings(max_examples=300, deadline=None)
@given(ids=token_ids, cuts=st.lists(st.integers(0, 40)), which=st.sampled_from([0, 1]), skip=st.booleans(),
       continues=st.booleans())  # fmt: skip
def test_deltas_join_to_the_whole_decode(ids, cuts, which, skip, continues):
    tokenizer = TOKENIZERS[which]
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continues=continues)
    deltas = [stream.push(part) for part in chunked(ids, cuts)]
    text = "".join(deltas) + stream.flush()
    assert text == tokenizer.decode(ids, skip, continues=continues)
    shown = b"".join(
        tokenizer.token_bytes(i) for i in ids if not (skip and i in tokenizer.special_ids)
    )  # the definition, without any state
    if which == 1 and not continues and shown.startswith(b" "):
        shown = shown[1:]
    assert text == shown.decode("utf-8", errors="replace")


@settings(max_examples=300, deadline=None)
@given(ids=token_ids, skip=st.booleans())
def test_byte_level_decode_is_that_of_tokenizers(ids, skip):
    assert BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL.backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30), skip=st.booleans())
def test_spm_decode_is_that_of_tokenizers_on_valid_text(text, skip):
    ids = SPM.encode(text)
    assert SPM.decode(ids, skip) == SPM.backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), which=st.sampled_from([0, 1]))
def test_text_survives_a_round_trip(text, which):
    tokenizer = TOKENIZERS[which]
    assume(not any(t in text for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<s>", "</s>")))
    ids = tokenizer.encode(text)
    # SentencePiece writes a space as U+2581, so that character itself comes back as a space.
    assert tokenizer.decode(ids) == (text.replace("▁", " ") if which else text)


def test_half_a_character_is_never_shown():
    ids = [BYTE_LEVEL.vocab[c] for c in "ðŁĺĢ"]  # the four bytes of U+1F600, one token each
    stream = IncrementalDetokenizer(BYTE_LEVEL)
    assert [stream.push([i]) for i in ids] == ["", "", "", "😀"]
    assert stream.push(ids[:2]) == "" and stream.flush() == "\ufffd"
    fallback = [SPM.vocab[f"<0x{b:02X}>"] for b in "é".encode()]
    stream = IncrementalDetokenizer(SPM, continues=True)
    assert [stream.push([i]) for i in fallback] == ["", "é"]


def test_spm_leading_space():
    ids = SPM.encode("the", add_special_tokens=False)
    assert SPM.decode(ids) == "the" and SPM.decode(ids, continues=True) == " the"
    assert SPM.decode([1, *ids]) == "the" and SPM.decode([1, *ids], skip_special_tokens=False) == "<s> the"


def test_cost_is_linear():
    ids = BYTE_LEVEL.encode("the stopping ab ") * 4000
    stream = TextStream(BYTE_LEVEL, stop=["never there", "ab" * 50])
    start = time.process_time()
    for i in ids:
        stream.push([i])
    # Quadratic work over 4e4 tokens would take minutes.
    assert len(ids) > 30_000 and time.process_time() - start < 10


def reference(pieces, stops, *, include, min_tokens):
    """(text, cut): by looking at the whole text after every token."""
    text = ""
    for n, piece in enumerate(pieces, 1):
        before, text = len(text), text + piece
        if n <= min_tokens:
            continue
        ends = [
            (start, start + len(s))
            for s in stops
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > before
        ]
        if ends:
            return text[: min(ends)[1 if include else 0]], n
    return text, None


@settings(max_examples=600, deadline=None)
@given(
    words=st.lists(st.text("ab日", max_size=4), max_size=12),
    stops=st.lists(st.text("ab日", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 40)),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_match_the_definition_for_any_chunking(words, stops, cuts, include, min_tokens):
    ids = [i for w in words for i in BYTE_LEVEL.encode(w)]
    single = IncrementalDetokenizer(BYTE_LEVEL)
    pieces = [single.push([i]) for i in ids]
    stream = TextStream(BYTE_LEVEL, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    text, cut = "", None
    for part in chunked(ids, cuts):
        delta = stream.push(part)
        text += delta.text
        if delta.cut is not None:
            cut = delta.cut
            break
        # What is withheld is never more than needed: the rest of the text is out.
        held = sum(len(p) for p in pieces[: stream.num_tokens]) - len(text)
        assert held < max(map(len, stops), default=1)
    text += stream.finish()
    assert (text, cut) == reference(pieces, stops, include=include, min_tokens=min_tokens)


def test_the_start_of_a_stop_string_is_withheld_and_given_back():
    stream = TextStream(BYTE_LEVEL, stop=["END."])
    one = [BYTE_LEVEL.encode(c)[0] for c in "xEN"]
    assert [stream.push([i]).text for i in one] == ["x", "", ""]
    assert stream.push(BYTE_LEVEL.encode("D")).text == ""
    assert stream.push(BYTE_LEVEL.encode("!")).text == "END!" and stream.finish() == ""


def test_cut_counts_tokens_and_later_tokens_are_ignored():
    ids = BYTE_LEVEL.encode("ab END tail")
    stream = TextStream(BYTE_LEVEL, stop=["END"])
    delta = stream.push(ids)
    kept = BYTE_LEVEL.decode(ids[: delta.cut])
    assert delta.text == "ab " and delta.stop == "END" and kept.endswith("END") and len(kept) == 6
    assert stream.push(ids).text == "" and stream.push([]).cut == delta.cut and stream.finish() == ""


def test_of_two_matches_in_one_token_the_first_to_begin_wins():
    checker = StopStringChecker(["bc", "abcd"])
    assert checker.feed("xabcd") == "x" and checker.stopped_by == "abcd"
    checker = StopStringChecker(["bc", "abcd"])
    assert checker.feed("xabc") == "xa" and checker.stopped_by == "bc"
    checker = StopStringChecker(["abc", "ab"], include_stop=True)
    assert checker.feed("xabc") == "xab" and checker.stopped_by == "ab"


def test_min_tokens_ignores_matches_that_end_too_early():
    e, n, d = ([BYTE_LEVEL.vocab[c]] for c in "END")
    stream = TextStream(BYTE_LEVEL, stop=["END"], min_tokens=3)
    assert "".join(stream.push(t).text for t in (e, n, d)) == "END"
    assert stream.push(e + n + d).cut == 6
    assert TextStream(BYTE_LEVEL, stop=["END"], min_tokens=2).push(e + n + d).cut == 3


def test_stop_token_text_is_hidden_unless_asked_for():
    ids = [*BYTE_LEVEL.encode("ab"), BYTE_LEVEL.vocab["END"]]
    for include, text in ((False, "ab"), (True, "abEND")):
        for stop in ((), ("zz",)):
            stream = TextStream(BYTE_LEVEL, stop=stop, include_stop_str_in_output=include)
            assert stream.push(ids, stop_token=True).text + stream.finish() == text
            assert stream.num_tokens == len(ids)


def test_special_tokens_kept_can_complete_a_stop_string():
    ids = [*BYTE_LEVEL.encode("ab"), 2]
    assert TextStream(BYTE_LEVEL, stop=["im_end"]).push(ids).cut is None
    assert TextStream(BYTE_LEVEL, stop=["im_end"], skip_special_tokens=False).push(ids).cut == len(ids)


def test_for_request_and_absent_tokenizer():
    params = SamplingParams(stop="END", include_stop_str_in_output=True)
    assert TextStream.for_request(BYTE_LEVEL, params).push(BYTE_LEVEL.encode("xEND")).text == "xEND"
    absent = Tokenizer.absent(eos_ids=[7])
    stream = TextStream.for_request(absent, SamplingParams())
    assert stream.push([1, 2, 3]).text == "" and stream.finish() == "" and stream.num_tokens == 3
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        TextStream(absent, stop=["x"])
