"""The offline API on tiny models: what a caller can ask, what comes back, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError, InvalidRequestError, ModelLoadError, SlipstreamError, UnsupportedError
from slipstream.models import load_model
from tests.support.kit import VOCAB, perturb, tiny_model_dir, write_tokenizer
from tests.support.reference import DenseReference, planted_oracle

CONTEXT = 64
PROMPT = (5, 9, 31, 7, 60)
TEMPLATE = (
    "{% for m in messages %}{{ 'w90 ' if m.role == 'user' else 'w91 ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w91{% endif %}"
)


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("api")
    target = tiny_model_dir(root / "target", seed=1)
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    other_words = tiny_model_dir(root / "words", seed=1)
    tokens = json.loads((other_words / "tokenizer.json").read_text())
    tokens["model"]["vocab"] |= {"w5": 6, "w6": 5}
    (other_words / "tokenizer.json").write_text(json.dumps(tokens))
    wide = tiny_model_dir(root / "wide", seed=1, vocab_size=VOCAB + 32)
    write_tokenizer(wide, VOCAB + 32)
    return {
        "target": target,
        "draft": perturb(target, root / "draft", scale=0.02),
        "wide": wide,
        "words": other_words,
    }


@pytest.fixture(scope="module")
def llm(dirs: dict[str, Path]) -> LLM:
    return build(dirs)


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> DenseReference:
    return DenseReference(load_model(dirs["target"], dtype="float64").model)


def build(dirs: dict[str, Path], **options: Any) -> LLM:
    return LLM(model=str(dirs["target"]), **{"dtype": "float64", "max_model_len": CONTEXT, **options})


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more})


def seeded(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": 3, "max_tokens": max_tokens, "ignore_eos": True, **more})


def text_of(ids: list[int] | tuple[int, ...]) -> str:
    return " ".join(f"w{i}" for i in ids)


# -- what comes back -------------------------------------------------------------------------------------------


def test_text_and_ids_are_the_same_prompt(llm: LLM, reference: DenseReference) -> None:
    by_text, by_ids = (llm.generate(p, greedy())[0] for p in (text_of(PROMPT), list(PROMPT)))
    want = reference.continuation(PROMPT, greedy())
    for out in (by_text, by_ids):
        assert out.prompt_token_ids == list(PROMPT)
        assert out.outputs[0].token_ids == want
        assert out.outputs[0].text.strip() == text_of(want)
        assert out.outputs[0].finish_reason == "length" and out.finished
    assert (by_text.prompt, by_ids.prompt) == (text_of(PROMPT), None)


def test_results_come_in_the_order_of_the_prompts(llm: LLM, reference: DenseReference) -> None:
    prompts = [PROMPT[: 1 + i % 5] for i in range(20)]
    params = [greedy(1 + 5 * (i % 4)) if i % 2 else seeded(3 + i, seed=i) for i in range(20)]
    outs = llm.generate([list(p) for p in prompts], params)
    want = [reference.continuation(p, s) for p, s in zip(prompts, params, strict=True)]
    assert [o.outputs[0].token_ids for o in outs] == want
    llm.check_idle()


def test_one_set_of_parameters_per_prompt_or_one_for_all(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 3 prompts"):
        llm.generate([[1], [2], [3]], [greedy()] * 2)
    assert llm.generate([], greedy()) == []


def test_children_differ_and_can_be_had_again(llm: LLM, reference: DenseReference) -> None:
    params = seeded(n=4)
    first, second = llm.generate([list(PROMPT)] * 2, params)
    lists = [o.token_ids for o in first.outputs]
    assert lists == [reference.continuation(PROMPT, params, child) for child in range(4)]
    assert lists == [o.token_ids for o in second.outputs]
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(t) for t in lists}) == 4
    # Child 0 is what the same request with n=1 gives.
    assert lists[0] == llm.generate(list(PROMPT), seeded())[0].outputs[0].token_ids


def test_unseeded_requests_differ(llm: LLM) -> None:
    outs = llm.generate([list(PROMPT)] * 4, seeded(seed=None))
    assert len({tuple(o.outputs[0].token_ids) for o in outs}) > 1


def test_chat_applies_the_template(llm: LLM, reference: DenseReference) -> None:
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    messages.append({"role": "user", "content": "w4"})
    want = [90, 1, 2, 91, 3, 90, 4, 91]
    assert llm.chat_prompt(messages) == want
    one = llm.chat(messages, greedy())
    assert [o.prompt_token_ids for o in one] == [want]
    assert one[0].outputs[0].token_ids == reference.continuation(tuple(want), greedy())
    two = llm.chat([messages, messages[:1]], greedy())
    assert [o.prompt_token_ids for o in two] == [want, [90, 1, 2, 91]]


def test_chat_needs_a_template(dirs: dict[str, Path]) -> None:
    with LLM(model=str(dirs["draft"]), max_model_len=CONTEXT) as bare:
        with pytest.raises(SlipstreamError, match="chat template"):
            bare.chat([{"role": "user", "content": "w1"}])
        assert bare.generate("w1", greedy(2))[0].outputs[0].token_ids


def test_without_a_tokenizer_ids_work_and_text_does_not(dirs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((dirs["target"] / name).read_bytes())
    with LLM(model=str(tmp_path), dtype="float64", max_model_len=CONTEXT) as bare:
        out = bare.generate(list(PROMPT), greedy())[0].outputs[0]
        assert len(out.token_ids) == 12 and out.text == ""
        with pytest.raises(SlipstreamError, match="tokenizer"):
            bare.generate("w1", greedy())
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            bare.generate([1], greedy(stop="w1"))
        bare.check_idle()


def test_stream_joins_to_the_whole(dirs: dict[str, Path]) -> None:
    with build(dirs, draft=str(dirs["draft"])) as llm:
        whole = llm.generate(list(PROMPT), seeded(30, n=2))[0]
        chunks = list(llm.stream(list(PROMPT), seeded(30, n=2)))
        for child in range(2):
            mine = [c for c in chunks if c.index == child]
            assert "".join(c.text for c in mine) == whole.outputs[child].text
            assert [t for c in mine for t in c.token_ids] == whole.outputs[child].token_ids
            assert [c.finish_reason for c in mine if c.finish_reason] == ["length"] == [mine[-1].finish_reason]
            assert all(0 <= c.accepted <= len(c.token_ids) for c in mine)
        assert [c.output is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert sum(c.accepted for c in chunks) == whole.spec.accepted > 0


@pytest.mark.parametrize("run_ahead", [1, 8])
def test_leaving_a_stream_aborts_the_request(dirs: dict[str, Path], run_ahead: int, reference: DenseReference) -> None:
    with build(dirs, draft="ngram", run_ahead=run_ahead) as llm:
        for _ in llm.stream(list(PROMPT), greedy(50)):
            break
        assert not llm._live
        llm.check_idle()
        stream = llm.stream(list(PROMPT), greedy(50))
        next(stream)
        other = llm.generate([[8, 9]], greedy())[0]  # another call steps the engine in between
        assert other.outputs[0].token_ids == reference.continuation((8, 9), greedy())
        stream.close()
        assert not llm._live
        llm.check_idle()


def test_two_streams_at_once(llm: LLM, reference: DenseReference) -> None:
    """Tokens that one stream's turn brings for the other must not be lost."""
    prompts = [PROMPT, PROMPT[::-1]]
    streams = [llm.stream(list(p), greedy(20)) for p in prompts]
    got: list[list[int]] = [[], []]
    outputs: list[Any] = [None, None]
    for _ in range(6):
        for i, s in enumerate(streams):
            chunk = next(s, None)
            got[i] += chunk.token_ids if chunk else []
    for i, s in enumerate(streams):
        for chunk in s:
            got[i] += chunk.token_ids
            outputs[i] = chunk.output or outputs[i]
    want = [reference.continuation(p, greedy(20)) for p in prompts]
    assert [o.outputs[0].token_ids for o in outputs] == want
    assert got == want


def test_a_stream_whose_request_ended_during_another_call(llm: LLM, reference: DenseReference) -> None:
    stream = llm.stream(list(PROMPT), greedy(8))
    got = list(next(stream).token_ids)
    llm.generate([8, 9], greedy(40))
    rest = list(stream)
    assert got + [t for c in rest for t in c.token_ids] == reference.continuation(PROMPT, greedy(8))
    assert rest[-1].finish_reason == "length" and rest[-1].output is not None
    llm.check_idle()


# -- how it ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("inside", [False, True])
def test_stop_strings(dirs: dict[str, Path], reference: DenseReference, draft: str | None, inside: bool) -> None:
    want = reference.continuation(PROMPT, seeded(20))
    stop = f"w{want[6]} w{want[7]}"  # spans two tokens
    with build(dirs, draft=draft, run_ahead=2) as llm:
        out = llm.generate(list(PROMPT), seeded(20, stop=["zzz", stop], include_stop_str_in_output=inside))[0]
        got = out.outputs[0]
        n = next(n for n in range(1, 21) if stop in text_of(want[:n]))
        assert got.finish_reason == "stop" and got.token_ids == want[:n]
        before = text_of(want[:n]).split(stop)[0]
        assert got.text.strip() == (before + stop if inside else before).strip()
        llm.check_idle()


@pytest.mark.parametrize("draft", [None, "ngram", "self"])
def test_stop_token_ids_and_min_tokens(dirs: dict[str, Path], reference: DenseReference, draft: str | None) -> None:
    want = reference.continuation(PROMPT, greedy(20))
    stop = want[6]
    first = want.index(stop)
    with build(dirs, draft=str(dirs["target"]) if draft == "self" else draft) as llm:
        got = llm.generate(list(PROMPT), greedy(20, stop_token_ids=[stop]))[0].outputs[0]
        assert (got.token_ids, got.finish_reason) == (want[: first + 1], "stop")
        # Banned until min_tokens exist: not among the first 15, wherever the model would have put it.
        late = llm.generate(list(PROMPT), greedy(20, stop_token_ids=[stop], min_tokens=15))[0].outputs[0]
        assert stop not in late.token_ids[:15] and len(late.token_ids) >= 15
        assert late.token_ids[:first] == want[:first]
        both = llm.generate([list(PROMPT)] * 2, [greedy(20, stop_token_ids=[stop], min_tokens=15), greedy(20)])
        assert [o.outputs[0].token_ids for o in both] == [late.token_ids, want]
        llm.check_idle()


def test_end_of_sequence_and_ignore_eos(dirs: dict[str, Path], reference: DenseReference, tmp_path: Path) -> None:
    want = reference.continuation(PROMPT, greedy(20))
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes((dirs["target"] / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [want[4], 95]}))
    with LLM(model=str(folder), dtype="float64", draft="ngram", max_model_len=CONTEXT) as llm:
        ends, goes_on = llm.generate([list(PROMPT)] * 2, [greedy(20, ignore_eos=False), greedy(20)])
        assert ends.outputs[0].token_ids == want[: want.index(want[4]) + 1]
        assert ends.outputs[0].finish_reason == "stop"
        assert (goes_on.outputs[0].token_ids, goes_on.outputs[0].finish_reason) == (want, "length")


@pytest.mark.parametrize("draft", [None, "ngram", "self"])
def test_up_to_the_end_of_the_context(dirs: dict[str, Path], reference: DenseReference, draft: str | None) -> None:
    with build(dirs, draft=str(dirs["target"]) if draft == "self" else draft, page_size=16) as llm:
        room = CONTEXT - len(PROMPT)
        want = reference.continuation(PROMPT, greedy(room))
        for max_tokens in (room, None):
            got = llm.generate(list(PROMPT), greedy(max_tokens=max_tokens))[0].outputs[0]
            assert (got.token_ids, got.finish_reason) == (want, "length")
        longest = llm.generate([[1] * (CONTEXT - 1)], greedy(max_tokens=None))[0].outputs[0]
        assert len(longest.token_ids) == 1 and longest.finish_reason == "length"
        llm.check_idle()


# -- drafts change nothing but speed ---------------------------------------------------------------------------


def drafts(dirs: dict[str, Path], reference: DenseReference) -> dict[str, dict[str, Any]]:
    known = lambda r: reference.continuation(r.prompt_token_ids, r.params, r.child)
    return {
        "none": {},
        "ngram": {"draft": "ngram", "num_drafts": 5, "draft_options": {"min_n": 1, "gate": False}},
        "oracle": {"draft": planted_oracle(known, vocab=VOCAB, seed=4), "num_drafts": 3},
        "model": {"draft": str(dirs["draft"]), "num_drafts": 2},
    }


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("draft", ["none", "ngram", "oracle", "model"])
def test_a_seed_means_one_output(dirs: dict[str, Path], reference: DenseReference, draft: str, run_ahead: int) -> None:
    """Whatever the batch, the neighbours, the drafter, the run-ahead; a greedy neighbour keeps its own, too."""
    params = [seeded(16), greedy(16), seeded(16, seed=None), seeded(16, seed=8, top_k=10, min_p=0.01)]
    with build(dirs, run_ahead=run_ahead, **drafts(dirs, reference)[draft]) as llm:
        for chosen in ([0], [1], [0, 1], [2, 1, 3, 0], [0, 2, 2, 2, 2, 1]):
            outs = llm.generate([list(PROMPT)] * len(chosen), [params[i] for i in chosen])
            for i, out in zip(chosen, outs, strict=True):
                if params[i].seed is not None or params[i].greedy:
                    assert out.outputs[0].token_ids == reference.continuation(PROMPT, params[i])
        llm.check_idle()


@pytest.mark.parametrize("draft", ["none", "ngram", "oracle", "model"])
def test_statistics_add_up(dirs: dict[str, Path], reference: DenseReference, draft: str) -> None:
    options = drafts(dirs, reference)[draft]
    with build(dirs, run_ahead=2, **options) as llm:
        outs = llm.generate([list(PROMPT), list(PROMPT[::-1])], [greedy(30), seeded(30, n=3)])
        for out in outs:
            spec = out.spec
            assert 0 <= spec.accepted <= spec.drafted <= spec.rounds * options.get("num_drafts", 0)
            # The first token of each child comes from its prefill.
            assert spec.emitted == sum(len(o.token_ids) - 1 for o in out.outputs)
            # Every round ends with a token of the target's own, unless max_tokens cut it.
            assert spec.emitted - len(out.outputs) <= spec.accepted + spec.rounds - len(out.outputs) <= spec.emitted
            assert sum(spec.accepted_per_position) == spec.accepted
            assert sum(spec.drafted_per_position) == spec.drafted
            assert spec.accepted_per_position == sorted(spec.accepted_per_position, reverse=True)
            assert spec.acceptance_length == spec.emitted / spec.rounds
            assert (spec.drafted > 0) == (draft != "none")


# -- what is refused -------------------------------------------------------------------------------------------

BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature nan": ({"temperature": float("nan")}, "temperature=nan"),
    "temperature negative": ({"temperature": -0.5}, r"temperature=-0\.5"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature=inf"),
    "top_p nan": ({"top_p": float("nan")}, "top_p=nan"),
    "top_p zero": ({"top_p": 0}, "top_p=0"),
    "top_p above": ({"top_p": 1.5}, r"top_p=1\.5"),
    "min_p negative": ({"min_p": -1}, "min_p=-1"),
    "top_k below": ({"top_k": -2}, "top_k=-2"),
    "top_k a float": ({"top_k": 2.5}, r"top_k=2\.5"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens=-1"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens=0"),
    "min_tokens negative": ({"min_tokens": -1}, "min_tokens=-1"),
    "min above max": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9"),
    "n zero": ({"n": 0}, "n=0"),
    "n absurd": ({"n": 10**9}, "n=1000000000"),
    "seed a word": ({"seed": "x"}, "seed='x'"),
    "empty stop": ({"stop": ""}, "stop="),
    "presence nan": ({"presence_penalty": float("nan")}, "presence_penalty=nan must be at least -2 and at most 2"),
    "frequency out of range": ({"frequency_penalty": -2.5}, "frequency_penalty=-2.5 must be at least -2"),
    "repetition zero": ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be at least 0.01 and at most 100"),
    "repetition inf": ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
    "bias a list": ({"logit_bias": [1]}, "logit_bias of type list"),
    "bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias token id='x'"),
    "bias of a negative token": ({"logit_bias": {-1: 1}}, "logit_bias token id=-1"),
    "bias nan": ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\]=nan must be at least -100 and at most 100"),
    "bias out of range": ({"logit_bias": {"1": 101}}, r"logit_bias\[1\]=101"),
    "processors a list of functions": ({"logits_processors": [len]}, "of type list must map names"),
    "processor argument nan": ({"logits_processors": {"x": float("nan")}}, r"logits_processors\['x'\]=nan"),
    "logprobs above the table": ({"logprobs": 21}, "logprobs=21 must be between 0 and 20"),
    "logprobs a truth": ({"logprobs": True}, "logprobs=True"),
    "prompt logprobs negative": ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
    "biases by the thousand": ({"logit_bias": dict.fromkeys(range(5000), 1)}, "5000 entries; the limit is 300"),
    "stop id negative": ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
}
NOT_BUILT = {
    "best_of": 2, "use_beam_search": True,
}  # fmt: skip


@pytest.mark.parametrize("values, says", BAD_PARAMS.values(), ids=BAD_PARAMS.keys())
def test_bad_sampling_values(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        SamplingParams(**values)


@pytest.mark.parametrize("name", NOT_BUILT)
def test_fields_that_are_not_built_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        SamplingParams(**{name: NOT_BUILT[name]})


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="'temprature'"):
        SamplingParams.from_dict({"temprature": 1})
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([[]], {}, "empty"),
    "too long": ([[1] * CONTEXT], {}, f"{CONTEXT} tokens; the limit is {CONTEXT - 1}"),
    "id out of range": ([[1, VOCAB]], {}, f"{VOCAB} must be .* to {VOCAB - 1}"),
    "id negative": ([[1, -1]], {}, "-1"),
    "id a float": ([[1, 2.5]], {}, "2.5"),
    "beyond the context": ([[1, 2]], {"max_tokens": CONTEXT - 1}, f"max_tokens={CONTEXT - 1} .* at most {CONTEXT - 2}"),
    "min beyond the context": ([[1]], {"min_tokens": 99, "max_tokens": None}, "min_tokens=99"),
    "stop id out of range": ([[1]], {"stop_token_ids": [VOCAB]}, f"stop token id {VOCAB}"),
    "processor that is not there": (
        [[1]],
        {"logits_processors": {"x": 1}},
        "'x' is not one of the engine's: it has none",
    ),
    "bias out of the vocabulary": ([[1]], {"logit_bias": {VOCAB: 1}}, f"logit_bias token id {VOCAB}"),
    "too many stop ids": ([[1]], {"stop_token_ids": list(range(17))}, "17 stop token ids; the limit is 16"),
    "good and bad": ([[1], [2], [VOCAB]], {}, f"{VOCAB}"),
}


def test_bad_requests_leave_the_others_alone(dirs: dict[str, Path], reference: DenseReference) -> None:
    """Each bad request comes while a stream is half way; the stream's tokens are the plain ones."""
    with build(dirs, draft="ngram", run_ahead=2) as llm:
        tokens: list[int] = []
        stream = llm.stream(list(PROMPT), seeded(50))
        for prompts, more, says in BAD_REQUESTS.values():
            tokens += next(stream).token_ids
            before = llm.stats()["counters"]["requests"]
            with pytest.raises(InvalidRequestError, match=says):
                llm.generate(prompts, greedy(**{"max_tokens": 4, **more}))
            assert llm.stats()["counters"]["requests"] == before, "nothing of a refused call may run"
            with pytest.raises(InvalidRequestError, match=says):
                next(llm.stream(prompts[-1], greedy(**{"max_tokens": 4, **more})))
        tokens += [t for chunk in stream for t in chunk.token_ids]
        assert tokens == reference.continuation(PROMPT, seeded(50))
        llm.check_idle()


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": ({"modle": "x"}, "'modle'"),
    "unknown drafter": ({"draft": "medusa"}, "medusa"),
    "drafter of another type": ({"draft": 5}, "draft=5"),
    "absurd num_drafts": ({"draft": "ngram", "num_drafts": 10**6}, "num_drafts=1000000 .* 31"),
    "negative num_drafts": ({"draft": "ngram", "num_drafts": -1}, "num_drafts=-1"),
    "num_drafts without a draft": ({"num_drafts": 3}, "num_drafts=3"),
    "run_ahead 0": ({"run_ahead": 0}, "run_ahead=0"),
    "page_size 0": ({"page_size": 0}, "page_size=0"),
    "page_size a float": ({"page_size": 16.0}, r"page_size=16\.0"),
    "prefill_chunk 0": ({"prefill_chunk": 0}, "prefill_chunk=0"),
    "max_slots 0": ({"max_slots": 0}, "max_slots=0"),
    "threads 0": ({"threads": 0}, "threads=0"),
    "too few pages": ({"num_pages": 1, "page_size": 16}, r"num_pages=1 .*\(needs 5\)"),
    "context too long": ({"max_model_len": 10**6}, "max_model_len=1000000 .* 512"),
    "context of nothing": ({"max_model_len": 0}, "max_model_len=0"),
    "unknown device": ({"device": "tpu"}, "device='tpu'"),
    "unknown dtype": ({"dtype": "float8"}, "dtype='float8'"),
    "unknown n-gram option": ({"draft": "ngram", "draft_options": {"max_m": 3}}, "'max_m'"),
    "n-gram lengths": ({"draft": "ngram", "draft_options": {"min_n": 5, "max_n": 2}}, "min_n=5"),
    "acceptance beyond the drafts": ({"draft": "ngram", "synthetic_acceptance": 9.0}, r"=9\.0 .* 4"),
    "acceptance without drafts": ({"synthetic_acceptance": 2.0}, "needs a draft"),
}


@pytest.mark.parametrize("options, says", BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options(dirs: dict[str, Path], options: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=says) as caught:
        build(dirs, **options)
    assert "\n" not in str(caught.value)


def test_a_draft_with_another_vocabulary(dirs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=f"{VOCAB + 32} tokens, the model {VOCAB}"):
        build(dirs, draft=str(dirs["wide"]))
    with pytest.raises(ConfigError, match="another vocabulary"):
        build(dirs, draft=str(dirs["words"]))
    with pytest.raises(ModelLoadError, match="nowhere"):
        build(dirs, draft=str(dirs["target"].parent / "nowhere"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(dirs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="device=cuda"):
        build(dirs, device="cuda")


def test_what_was_decided_can_be_read(dirs: dict[str, Path]) -> None:
    with build(dirs, draft="ngram", num_drafts=2, page_size=16) as llm:
        assert llm.resolved["num_drafts"] == 2 and llm.resolved["page_size"] == 16
        assert llm.resolved["dtype"] == "float64" and llm.resolved["device"] == "cpu"
        assert llm.resolved["architecture"] == "LlamaForCausalLM"
