"""Options that commands share, and what becomes of them. Checked before any model is loaded."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NoReturn

from slipstream.draft.default import with_default_draft
from slipstream.draft.options import SCHEDULE_HELP, TREE_HELP, WEIGHTS_HELP, tree_values
from slipstream.errors import ConfigError, InvalidRequestError
from slipstream.types import MAX_DRAFTS, SamplingParams

DEFAULT_MAX_TOKENS = 256

ENGINE_OPTIONS = (
    "model",
    "tokenizer",
    "revision",
    "load_format",
    "draft",
    "num_drafts",
    "draft_tree",
    "draft_weights",
    "adaptive",
    "confidence_schedule",
    "device",
    "dtype",
    "max_model_len",
    "run_ahead",
    "saved_states",
    "state_interval",
    "threads",
    "capture_seconds",
    "capture_mib",
    "gpu_memory_mib",
    "processors",
)
"""Options that are handed to `LLM` under the same name when the user gave them."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What is loaded and how it runs."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="M", help="directory, GGUF file or hub id (default: SmolLM2-135M-Instruct)")
    group.add_argument("--tokenizer", metavar="DIR", help="directory or hub id of the tokenizer, if not the model's")
    group.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub model")
    group.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        help="dummy: seeded random weights from a config.json",
    )
    group.add_argument(
        "--draft",
        metavar="D",
        help='"ngram", "suffix", "mtp" (the prediction head in the model\'s own checkpoint), or a draft (folder or hub '
        "id): an EAGLE-3, MTP, DFlash or DSpark head for the model, or a smaller model with the same vocabulary "
        '(default: the one that comes for the default model, adaptive; none for others; "none" drafts nothing)',
    )
    group.add_argument("--num-drafts", type=int, metavar="K", help=f"drafts per round, at most {MAX_DRAFTS}")
    group.add_argument("--draft-tree", metavar="TOPK,LEVELS,TOTAL", help=TREE_HELP)
    group.add_argument("--draft-weights", choices=("auto", "dense"), help=WEIGHTS_HELP)
    group.add_argument(
        "--adaptive", action="store_true", default=None, help="draft only as much as pays, up to --num-drafts, or not"
    )
    group.add_argument("--confidence-schedule", action="store_true", default=None, help=SCHEDULE_HELP)
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: cuda when there is one")
    group.add_argument("--dtype", choices=("auto", "float32", "float64", "bfloat16"))
    group.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer together")
    group.add_argument("--run-ahead", type=int, metavar="N", help="frames queued before the first result is read")
    group.add_argument(
        "--saved-states", type=int, metavar="N",
        help="models with recurrent layers: states kept for prefix hits (default 4 for each running answer, in at most "
        "a tenth of the memory for pages; 0: no prefix cache)",
    )  # fmt: skip
    group.add_argument(
        "--state-interval", type=int, metavar="N",
        help="tokens between two saved states, a multiple of 16 and of the page size, 32 (default: about 256)",
    )  # fmt: skip
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument(
        "--capture-seconds", type=float, metavar="S", help="most that capturing frames on a GPU may take (default 600)"
    )
    group.add_argument("--capture-mib", type=float, metavar="MIB", help="the same in GPU memory (default 8192)")
    group.add_argument("--gpu-memory-mib", type=float, metavar="MIB", help="most for weights and KV pages on a GPU")
    group.add_argument(
        "--processor", action="append", dest="processors", metavar="NAME",
        help="a custom logits processor, an entry point of an installed package; repeatable",
    )  # fmt: skip


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen. Greedy unless a temperature is given."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most tokens of the answer (default {DEFAULT_MAX_TOKENS}, or fewer where the context ends)",
    )
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no end before N tokens")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0, the default, takes the likeliest token",
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=-1, metavar="N")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1, the default, is off")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--seed", type=int, metavar="S", help="same seed, same text, with or without drafts")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def add_color_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour tokens that came from accepted drafts (auto: on a terminal, unless NO_COLOR is set)",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """max_tokens is None unless given, see `fit`. Raises InvalidRequestError for values out of range."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def fit(params: SamplingParams, room: int) -> SamplingParams:
    """The default of --max-tokens, for a prompt after which `room` tokens fit into the context."""
    if params.max_tokens is not None:
        return params
    return replace(params, max_tokens=max(1, params.min_tokens, min(DEFAULT_MAX_TOKENS, room)))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM`; an option that was not given is left to the engine's own default, but for the draft
    of the default model.

    Raises ConfigError for drafts that cannot be: too many, or a number of them without a drafter.
    """
    chosen = {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}
    chosen = with_default_draft(chosen)
    drafts = chosen.get("num_drafts", 0)
    if not 0 <= drafts <= MAX_DRAFTS:
        raise ConfigError(f"--num-drafts {drafts} must be between 0 and {MAX_DRAFTS}")
    if "draft_tree" in chosen and "draft" not in chosen:
        raise ConfigError("--draft-tree needs a drafter; add --draft with an EAGLE-3 or MTP head")
    if "draft_tree" in chosen:
        chosen["draft_tree"] = tree_values(chosen["draft_tree"])
    if drafts and "draft" not in chosen:
        raise ConfigError(f"--num-drafts {drafts} needs a drafter; add --draft ngram, suffix, mtp or PATH")
    if chosen.get("adaptive") and "draft" not in chosen:
        raise ConfigError("--adaptive needs a drafter; add --draft ngram, suffix, mtp or PATH")
    if chosen.get("confidence_schedule") and "draft" not in chosen:
        raise ConfigError("--confidence-schedule needs a draft with a confidence head; add --draft with a DSpark head")
    for name in ("max_model_len", "run_ahead", "state_interval", "threads"):
        if chosen.get(name, 1) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {chosen[name]} must be at least 1")
    if chosen.get("saved_states", 0) < 0:
        raise ConfigError(f"--saved-states {chosen['saved_states']} must be at least 0")
    for name in ("capture_seconds", "capture_mib", "gpu_memory_mib"):
        if not chosen.get(name, 1) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {chosen[name]} must be above 0")
    return chosen


def token_ids(text: str) -> list[int]:
    """ "1,2,3" as token ids. Raises InvalidRequestError that names the first part that is none."""
    ids = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit() and len(word) <= 10):
            raise InvalidRequestError(
                f"--prompt-ids: {word[:20]!r} is not a token id; give whole numbers such as 1,2,3"
            )
        ids.append(int(word))
    return ids


def utf8(text: str, what: str) -> str:
    """Refuses an argument that came as bytes outside UTF-8: it holds lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not valid UTF-8 at character {error.start}") from None
    return text
