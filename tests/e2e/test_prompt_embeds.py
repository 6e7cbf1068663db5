"""Prompts that are more than token ids: embeddings of one's own, pictures, and what does not fit together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.device import control, frame
from slipstream.device.media import EmbedRing
from slipstream.errors import ConfigError, InvalidRequestError, UnsupportedError
from slipstream.models.mrope import layout_positions
from tests.support.kernel_engine import SHAPES, take_a_gpus_way
from tests.support.kit import VOCAB, tiny_model_dir
from tests.support.pictures import axes, picture, pictures_and_text

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PICTURES = axes(2, 1, 1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose rotary embedding has three axes, as Qwen3-VL's text model."""
    return tiny_model_dir(tmp_path_factory.mktemp("seeing") / "m", seed=4, **PICTURES)


def tokens_of(llm: LLM, prompt: Any, **fields: Any) -> list[int]:
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}))[
        0
    ].outputs[0].token_ids  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_a_tokens_own_embeddings_change_nothing(tmp_path: Path, arch: str) -> None:
    """Any model takes embeddings for all tokens; those that the tokens have give the tokens' output."""
    ids = random.Random(0).choices(range(3, VOCAB), k=20)
    with LLM(model=str(tiny_model_dir(tmp_path / "m", seed=2, arch=arch)), dtype="float64", prefill_chunk=7) as llm:
        model = llm._built.model
        embeds = model.embed(torch.tensor(ids)) * model.embed_scale
        want = tokens_of(llm, ids)
        assert tokens_of(llm, {"prompt_token_ids": ids, "prompt_embeds": embeds}) == want
        other = tokens_of(llm, {"prompt_token_ids": ids, "prompt_embeds": embeds.flip(0)})
        assert other != want, "the prefix cache told them apart, and the embeddings were read"
        llm.check_idle()


def by_definition(llm: LLM, prompt: dict[str, Any], count: int) -> list[int]:
    """Greedy tokens without cache or engine: all positions from the layout of prompt and output."""
    model, ids = llm._built.model, list(prompt["prompt_token_ids"])
    n, vision = len(ids), model.config.vision
    while len(ids) < n + count:
        at = torch.from_numpy(layout_positions(ids, prompt["image_grid_thw"], (), vision))
        given_R = torch.tensor([i < n and token == vision.image for i, token in enumerate(ids)])
        embeds = torch.zeros(len(ids), model.config.hidden_size, dtype=model.dtype)
        embeds[given_R] = prompt["prompt_embeds"].to(model.dtype)
        with torch.inference_mode():
            hidden, _ = model.forward(
                torch.tensor(ids), at, DenseCausal(torch.arange(len(ids))), given=(embeds, given_R)
            )
            ids.append(int(model.logits(hidden[-1:]).argmax()))
    return ids[n:]


@pytest.mark.parametrize("fault", ["none", "delta", "offsets"])
def test_output_stands_behind_the_grid(seeing: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Each slot's own delta, three deltas in one batch; negative controls: without one other tokens come out."""
    if fault == "delta":
        monkeypatch.setattr(frame, "row_positions", lambda state, slot_R, pos_R: pos_R)
    if fault == "offsets":
        monkeypatch.setattr(frame, "chunk_positions", lambda state, pos_R: pos_R)
    prompts: list[dict[str, Any]] = [
        {"prompt_token_ids": [3 + i, 4, *[90] * (h * w // 4), 5], "prompt_embeds": picture(h * w // 4, i),
         "image_grid_thw": [[1, h, w]]}
        for i, (h, w) in enumerate(((4, 6), (2, 16), (8, 8)))
    ]  # fmt: skip
    with LLM(model=str(seeing), dtype="float64", max_model_len=96) as llm:
        want = [by_definition(llm, p, 24) for p in prompts]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        got = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        llm.check_idle()
    assert (got == want) == (fault == "none")


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_pictures_under_pressure(seeing: Path, run_ahead: int) -> None:
    """Few pages, several slots, preemptions, chunks of 5: what a request gives does not depend on who is beside it."""
    rng = random.Random(run_ahead)
    prompts: list[Any] = []
    for i in range(6):
        head, tail = rng.choices(range(3, 80), k=5), rng.choices(range(3, 80), k=1 + i)
        ids = [*head, *[90] * 6, *tail]
        prompts.append({"prompt_token_ids": ids, "prompt_embeds": picture(6, i), "image_grid_thw": [[1, 4, 6]]})
        prompts.append([*head, *tail])
    options: dict[str, Any] = {"dtype": "float64", "max_model_len": 64, "page_size": 4}
    with LLM(model=str(seeing), **options) as llm:
        params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
        want = [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]
    pressed = {"num_pages": 20, "max_slots": 4, "prefill_chunk": 5, "run_ahead": run_ahead, "draft": "ngram"}
    with LLM(model=str(seeing), **options, **pressed) as llm:
        outs = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        assert outs == want
        assert llm.stats()["counters"]["preemptions"] > 0
        llm.check_idle()
    assert len({tuple(t) for t in want}) > 8


MIXED = pictures_and_text()


@pytest.mark.parametrize("fault", ["none", "offsets", "marks", "rows"])
@pytest.mark.parametrize(
    ("arch", "fused", "draft"), [("llama", True, "ngram"), ("llama", False, None), ("qwen3_5_text", True, None)]
)
def test_a_gpus_pass_reads_pictures_beside_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, fused: bool, draft: str | None, fault: str
) -> None:
    """Chunks of 8 rows, padded, pictures across their edges: the CPU's own tokens. Negative controls: other offsets, no
    marks, the rows' embeddings not brought up."""
    values = axes(1, 1, 0, partial_rotary_factor=0.5) if arch == "qwen3_5_text" else PICTURES
    options: dict[str, Any] = {
        "model": str(tiny_model_dir(tmp_path / "m", seed=4, arch=arch, **values)), "dtype": "float32", "page_size": 4,
        "max_model_len": 96, "draft": draft,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(**options) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(MIXED, params)]
    take_a_gpus_way(monkeypatch, fused=fused)
    if fault == "offsets":
        monkeypatch.setattr(frame, "chunk_positions", lambda state, pos_R: pos_R.expand(3, -1))
    if fault == "marks":
        monkeypatch.setattr(control, "_given_marks", lambda span, media: 0)
    if fault == "rows":
        monkeypatch.setattr(EmbedRing, "send", lambda self, plan: None)
    with LLM(**options, **SHAPES) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(MIXED, params)]
        assert llm._built.device.frame.kernels and (llm._built.device.frame.fused is not None) == fused
        llm.check_idle()
    assert (got == want) == (fault == "none")
    assert got[1::2] == want[1::2], "text never depends on it"


def test_the_same_picture_shares_its_prefix(seeing: Path) -> None:
    ids = [*range(3, 13), *[90] * 6, *range(20, 30)]
    one = {"prompt_token_ids": ids, "prompt_embeds": picture(6, 1), "image_grid_thw": [[1, 4, 6]]}
    other = {**one, "prompt_embeds": picture(6, 2)}
    turned = {**one, "image_grid_thw": [[1, 6, 4]]}
    with LLM(model=str(seeing), dtype="float64", page_size=4, max_model_len=64) as llm:
        first = tokens_of(llm, one)
        hits = lambda: llm.stats()["counters"].get("cached_prompt_tokens", 0)
        assert hits() == 0
        assert tokens_of(llm, one) == first and hits() == 24
        assert tokens_of(llm, other) != first and tokens_of(llm, turned) != first and hits() == 24
        llm.check_idle()


GRID = {"image_grid_thw": [[1, 4, 6]]}
IDS = [3, 4, *[90] * 6, 5]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"image_grid_thw": [[1, 4, 4]]}, "image_grid_thw makes 4 image tokens .* the prompt has 6"),
    ({"image_grid_thw": []}, "makes 0 image tokens .* the prompt has 6"),
    ({"image_grid_thw": [[1, 4, 6], [1, 2, 2]]}, "makes 7 image tokens .* the prompt has 6"),
    ({"image_grid_thw": [[1, 5, 6]]}, r"grid \[1, 5, 6\]: height and width must be multiples of 2"),
    ({"image_grid_thw": [[1, 4]]}, r"image_grid_thw has \[1, 4\]; it must be three whole numbers"),
    ({"image_grid_thw": [[1, 0, 6]]}, r"\[1, 0, 6\]; it must be three whole numbers above 0"),
    ({"video_grid_thw": [[1, 4, 6]]}, "video_grid_thw makes 6 video tokens .* the prompt has 0"),
    ({"prompt_embeds": picture(5, 0)}, r"shape \[5, 32\]; the prompt needs \[6, 32\]"),
    ({"prompt_embeds": picture(6, 0)[:, :31]}, r"shape \[6, 31\]; the prompt needs \[6, 32\]"),
    ({"prompt_embeds": picture(6, 0) / 0}, "not finite"),
    ({"prompt_embeds": [[0.0] * 32] * 6}, "must be a tensor of real numbers, not list"),
    ({"prompt_embeds": None}, "has 6 image and video tokens and no prompt_embeds"),
    ({"prompt_token_ids": []}, "prompt_token_ids must be a list of at least one whole number"),
    ({"prompt_token_ids": [3, 4, *[90] * 3, 7, *[90] * 3]}, "the picture at token 2 has 6 tokens by its grid"),
    ({"image": "cat.png"}, "prompt key 'image' is unknown"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:30] for _, m in BAD])
def test_bad_input_names_what_does_not_fit(seeing_llm: LLM, change: dict[str, Any], message: str) -> None:
    good = {"prompt_token_ids": IDS, "prompt_embeds": picture(6, 0), **GRID}
    with pytest.raises(InvalidRequestError, match=message):
        seeing_llm.generate([good, {**good, **change}], PARAMS)
    seeing_llm.check_idle()


@pytest.fixture(scope="module")
def seeing_llm(seeing: Path) -> LLM:
    return LLM(model=str(seeing), max_model_len=64)


def test_a_model_without_pictures_refuses_grids(tmp_path: Path) -> None:
    with (
        LLM(model=str(tiny_model_dir(tmp_path / "m"))) as llm,
        pytest.raises(InvalidRequestError, match="LlamaForCausalLM has no image positions"),
    ):
        llm.generate({"prompt_token_ids": [3, 4], **GRID}, PARAMS)


def test_an_engine_without_room_refuses_embeddings(tmp_path: Path) -> None:
    folder = str(tiny_model_dir(tmp_path / "m"))
    prompt = {"prompt_token_ids": [3, 4], "prompt_embeds": picture(2, 0)}
    with LLM(model=folder, prompt_embeds=False) as llm:
        assert llm.resolved["embeds_bytes"] == 0 and llm._built.device.frame.state.chunk_given_R is None
        with pytest.raises(UnsupportedError, match="no room for them; start it with prompt_embeds=True"):
            llm.generate([[3, 4], prompt], PARAMS)
        llm.check_idle()
        assert len(tokens_of(llm, {"prompt_token_ids": [3, 4]})) == 12
    with LLM(model=folder, prompt_embeds=True) as llm:
        assert llm.resolved["embeds_bytes"] == 256 * 32 * 4  # a row of a chunk each
        assert len(tokens_of(llm, prompt)) == 12
    with pytest.raises(ConfigError, match="prompt_embeds='yes' must be True or False"):
        LLM(model=folder, prompt_embeds="yes")
