"""The engine in steady decode, for cases that put a form back into it."""

from __future__ import annotations

import contextlib
import random
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slipstream.types import SamplingParams

PROMPT, WARM_UP, RUN_AHEAD, PAGE = 128, 24, 8, 32


@contextlib.contextmanager
def steady_decode(given: Namespace) -> Iterator[Any]:
    """An `LLM` in which `given.batch` greedy requests decode for `given.frames` frames more than the warm-up.

    given: model, options (of `LLM`), sampling (fields of the requests), batch, frames, device.
    """
    from slipstream.llm import LLM

    most = given.options.get("num_drafts", 0) + 1
    tokens = (WARM_UP + given.frames + RUN_AHEAD) * most
    pages = -(-(PROMPT + tokens + 1 + 2 * most) // PAGE)  # nobody is preempted, however long the run
    on_gpu = given.device == "cuda"
    with LLM(
        model=given.model, load_format="dummy", device=given.device, dtype="bfloat16" if on_gpu else "float32",
        max_slots=given.batch, slot_buckets=(given.batch,), max_model_len=PROMPT + tokens + 1, run_ahead=RUN_AHEAD,
        page_size=PAGE, num_pages=given.batch * pages, prefix_cache=False, **given.options,
    ) as llm:  # fmt: skip
        rng = random.Random(0)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **given.sampling)
        for _ in range(given.batch):
            prompt = [rng.randrange(llm.model_config.vocab_size - 1) for _ in range(PROMPT)]
            llm._submit(*llm._prepare(prompt, params))
        for _ in range(WARM_UP):
            llm._engine.step()
        yield llm
