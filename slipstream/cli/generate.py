"""`slipstream generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import Printer, show_notes, wants_color
from slipstream.cli.options import (
    Parser,
    add_color_option,
    add_engine_options,
    add_sampling_options,
    engine_options,
    fit,
    sampling_params,
    utf8,
)
from slipstream.cli.prompt import has_chat_template, read_prompt, room_after
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.outputs import RequestOutput
    from slipstream.types import SamplingParams

DESCRIPTION = """\
Answers PROMPT and prints the text as it comes; tokens that came from accepted drafts are coloured.
The last line gives the number of tokens, tokens per second and the acceptance length (tokens per round).

A model with a chat template gets PROMPT as the user's message of a conversation; --raw continues
PROMPT as it stands. A model without a template, and --prompt-ids, are always raw."""


def parser() -> Parser:
    p = Parser(
        prog="slipstream generate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("prompt", nargs="?", metavar="PROMPT", help='text, or "-" for standard input')
    p.add_argument("--prompt-ids", metavar="1,2,3", help="token ids instead of PROMPT")
    p.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    p.add_argument("--system", metavar="TEXT", help="system message before PROMPT; needs a chat template")
    p.add_argument("--json", action="store_true", help="print one JSON object when done, nothing else")
    add_color_option(p)
    add_engine_options(p)
    add_sampling_options(p)
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    prompt = read_prompt(args)
    system = None if args.system is None else utf8(args.system, "--system")
    if system is not None and (args.raw or not isinstance(prompt, str)):
        raise ConfigError(f"--system cannot go with {'--raw' if args.raw else '--prompt-ids'}; leave one out")
    params, options = sampling_params(args), engine_options(args)

    from slipstream.llm import LLM

    llm = LLM(**options)
    try:
        show_notes(llm)
        ids = _prompt_ids(llm, prompt, system, raw=args.raw)
        params = fit(params, room_after(llm, ids))
        if args.json:
            print(json.dumps(as_json(_silently(llm, ids, params))))
        else:
            _stream(llm, ids, params, color=wants_color(args.color, sys.stdout))
    finally:
        llm.close()
    return 0


def as_json(output: RequestOutput) -> dict[str, Any]:
    """The object that --json prints."""
    answer = output.outputs[0]
    prompt_tokens, completion_tokens = len(output.prompt_token_ids), len(answer.token_ids)
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "prompt_token_ids": list(output.prompt_token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "spec": output.spec.as_dict(),
    }


def _prompt_ids(llm: LLM, prompt: str | list[int], system: str | None, *, raw: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if raw or (system is None and not has_chat_template(llm)):
        return llm.tokenizer.encode(prompt)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return llm.chat_prompt([*messages, {"role": "user", "content": prompt}])


def _silently(llm: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    output = None
    for chunk in llm.stream(prompt, params):
        output = chunk.output or output
    assert output is not None, "a stream ends with its RequestOutput"
    return output


def _stream(llm: LLM, prompt: list[int], params: SamplingParams, *, color: bool) -> None:
    printer = Printer(sys.stdout, llm.tokenizer, color=color)
    output = None
    try:
        for chunk in llm.stream(prompt, params):
            printer.show(chunk)
            output = chunk.output or output
    finally:
        printer.end_line()
    print(printer.summary(output))
