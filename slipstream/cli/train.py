"""`slipstream train eagle3|dspark`: data, training, calibration, export and a first look at the result."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.options import Parser
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.models.config import ModelConfig
    from slipstream.train.corpus import Corpus
    from slipstream.train.layers import DraftHead
    from slipstream.train.loop import TrainOptions
    from slipstream.train.ranks import Ranks
    from slipstream.train.teacher import Teacher

KINDS = ("eagle3", "dspark", "corpus")
_LEAST = {
    "conversations": 1, "max_len": 32, "slots": 1, "held_out": 1, "draft_vocab": 1, "unroll": 1, "block_size": 1,
    "layers": 1, "intermediate_size": 1, "markov_rank": 1, "anchors": 1, "mask_token_id": 0,
}  # fmt: skip
"""Smallest values of the options."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: slipstream train eagle3|dspark|corpus --out DIR [options]\n\n"
            "  eagle3    an EAGLE-3 head: one layer over three tapped hidden states\n"
            "  dspark    a DSpark drafter: a block of drafts at once, with a Markov and a confidence head\n"
            "  corpus    only the training text; several may be made side by side with other seeds\n\n"
            "Data is generated with the model itself. A run that was stopped goes on where it was."
        )
        return 0 if argv else 2
    kind = argv[0]
    if kind not in KINDS:
        raise ConfigError(f"unknown draft kind {kind!r}; choose from {', '.join(KINDS)}")
    args = parser(kind).parse_args(argv[1:])
    for name, low in _LEAST.items():
        value = getattr(args, name, None)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {low}")
    if kind == "corpus":
        return _make_corpus(args)
    return _run(kind, args)


def parser(kind: str) -> Parser:
    """Arguments of `slipstream train KIND`."""
    parser = Parser(prog=f"slipstream train {kind}", description=f"Train: {kind}.")
    add = parser.add_argument
    add("--model", metavar="M", help="the target: directory, GGUF file or hub id (default: SmolLM2-135M-Instruct)")
    add("--out", metavar="DIR", required=True, help="where corpus, checkpoints, plot and the draft go")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    data = parser.add_argument_group("data")
    data.add_argument("--prompts", metavar="FILE", help="user turns; without it the model writes its own")
    data.add_argument("--conversations", type=int, default=20_000, metavar="N", help="default: 20000")
    data.add_argument(
        "--max-len", type=int, default=1024, metavar="N", help="tokens of prompt and answer (default: 1024)"
    )
    data.add_argument("--slots", type=int, metavar="N", help="answers generated side by side")
    if kind == "corpus":
        data.add_argument(
            "--time-limit",
            dest="generation_limit",
            type=float,
            metavar="S",
            help="begin no more answers after S seconds of generation",
        )
        return parser
    data.add_argument("--held-out", type=int, default=128, metavar="N", help="sequences kept for calibration")
    data.add_argument("--corpus", nargs="+", metavar="FILE", help="use these corpora instead of generating one")
    run = parser.add_argument_group("training")
    run.add_argument("--steps", type=int, default=1200, metavar="N", help="default: 1200")
    run.add_argument("--batch", type=int, default=64, metavar="N", help="sequences per step (default: 64)")
    run.add_argument("--lr", type=float, default=1e-3)
    run.add_argument("--checkpoint-every", type=int, default=200, metavar="N")
    run.add_argument(
        "--time-limit", type=float, metavar="S", help="stop after S seconds of training, with a checkpoint"
    )
    shape = parser.add_argument_group("draft")
    shape.add_argument("--taps", metavar="I,J,K", help="hidden states that are tapped (default: the format's own)")
    shape.add_argument("--intermediate-size", type=int, metavar="N", help="width of the MLPs (default: the target's)")
    if kind == "eagle3":
        shape.add_argument("--draft-vocab", type=int, default=16_384, metavar="N", help="most frequent ids kept")
        shape.add_argument("--unroll", type=int, default=6, metavar="N", help="steps of the training-time test")
    else:
        shape.add_argument("--block-size", type=int, default=7, metavar="N", help="drafts per round")
        shape.add_argument("--layers", type=int, default=2, metavar="N")
        shape.add_argument("--heads", type=int, metavar="N", help="of its attention (default: the target's)")
        shape.add_argument(
            "--kv-heads", type=int, metavar="N", help="heads of keys and values: what a slot reads of the target's "
            "features (default: the target's)",
        )  # fmt: skip
        shape.add_argument("--markov-rank", type=int, default=32, metavar="N")
        shape.add_argument("--anchors", type=int, default=64, metavar="N", help="blocks per sequence and step")
        shape.add_argument("--mask-token-id", type=int, metavar="ID", help="an id that text never has")
    return parser


def _run(kind: str, args: Any) -> int:
    from slipstream.train.plot import check
    from slipstream.train.ranks import Ranks

    check()
    device, out = _place(args)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not args.corpus:
        raise ConfigError("several processes train on text that is there: make it with `slipstream train corpus` and "
                          "name it with --corpus")  # fmt: skip
    ranks = Ranks.join(device)
    try:
        return _train(kind, args, device, out, ranks)
    finally:
        ranks.leave()


def _train(kind: str, args: Any, device: str, out: Path, ranks: Ranks) -> int:
    import torch

    from slipstream.train import loop
    from slipstream.train.plot import plot
    from slipstream.train.teacher import Teacher

    options = loop.TrainOptions(
        steps=args.steps, batch=args.batch, lr=args.lr, seed=args.seed, checkpoint_every=args.checkpoint_every,
        time_limit=args.time_limit,
    )  # fmt: skip
    target = _config(args.model)
    if kind == "dspark":
        from slipstream.train.dspark import draft_config

        draft_config(target, args.heads, args.kv_heads)  # before the text is made
    corpus = _corpus(args, out, device)
    kept, held_out = corpus.split(args.held_out)
    if ranks.rank == 0:
        print(f"corpus: {len(corpus)} conversations, {corpus.answer_tokens} answer tokens", file=sys.stderr)
    dtype = "bfloat16" if device == "cuda" else "float32"
    teacher = Teacher.load(args.model, taps=_taps(kind, args.taps, target.num_layers), device=device, dtype=dtype)
    vocab, highest = teacher.model_config.vocab_size, int(corpus.token_NT.max())
    if highest >= vocab or int(corpus.token_NT.min()) < 0:
        raise ConfigError(f"the corpus is of another model: it has the token id {highest}, the model has {vocab} ids")
    if (getattr(args, "mask_token_id", None) or 0) >= vocab:
        raise ConfigError(f"--mask-token-id {args.mask_token_id} must be below the vocabulary size {vocab}")
    torch.manual_seed(args.seed)
    head = _head(kind, args, teacher, kept).to(device)
    history = loop.train(head, teacher, kept, options, folder=out / "state", progress=_Bar(args.steps), ranks=ranks)
    if ranks.rank:
        return 0
    final = [round(a, 4) for a in loop.evaluate(head, teacher, held_out)]
    facts = _facts(kind, args, options, corpus, history.step[-1] + 1, final)
    loop.export(head, out, {"slipstream_training": facts})
    plot(history, out / "training.png", f"{kind} for {args.model or 'the default model'}")
    if kind == "dspark":
        _calibrate(head, teacher, held_out, out, args)
    (out / "metrics.json").write_text(
        json.dumps({"loss": history.loss[-1], "acceptance": final, "seconds": round(history.seconds, 1)}) + "\n"
    )
    print(f"{kind} written to {out}; agreement by position {final}; try: slipstream generate --draft {out}")
    return 0


def _place(args: Any) -> tuple[str, Path]:
    """The device, and the folder, made where it is missing."""
    import torch

    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {args.out!r} cannot be made a folder: {error.strerror}") from None
    if args.device == "auto":
        return ("cuda" if torch.cuda.is_available() else "cpu"), out
    return args.device, out


def _make_corpus(args: Any) -> int:
    device, out = _place(args)
    args.corpus = None
    corpus = _corpus(args, out, device)
    print(f"{out / 'corpus.safetensors'}: {len(corpus)} conversations, {corpus.answer_tokens} answer tokens")
    return 0


def _config(model: str | None) -> ModelConfig:
    """The target's, read without loading its weights."""
    from slipstream.models.config import parse_hf_config, read_hf_config, read_json
    from slipstream.models.gguf import GGUFFile
    from slipstream.models.gguf_model import read_gguf_config
    from slipstream.models.loader import resolve_source

    path = resolve_source(model)
    if path.suffix == ".gguf":
        return read_gguf_config(GGUFFile(path))
    return read_hf_config(path) if path.is_dir() else parse_hf_config(read_json(path))


def _taps(kind: str, given: str | None, layers: int) -> tuple[int, ...]:
    if given is not None:
        try:
            return tuple(int(t) for t in given.split(","))
        except ValueError:
            raise ConfigError(f"--taps {given!r} must be whole numbers such as 2,15,27") from None
    if kind == "eagle3":
        from slipstream.train.eagle3 import default_taps as eagle_taps

        return eagle_taps(layers)
    from slipstream.train.dspark import default_taps

    return default_taps(layers)


def _corpus(args: Any, out: Path, device: str) -> Corpus:
    """From a file, from an earlier start of this run, or generated now."""
    from slipstream.train.corpus import Corpus

    path = out / "corpus.safetensors"
    paths = [Path(p) for p in args.corpus] if args.corpus else [path]
    if all(p.is_file() for p in paths):
        return Corpus.load(*paths)
    if args.corpus:
        missing = next(p for p in paths if not p.is_file())
        raise ConfigError(f"--corpus {str(missing)!r} does not exist")
    from slipstream.llm import LLM
    from slipstream.train.generate import Recipe, generate_corpus, read_prompts

    prompts = read_prompts(Path(args.prompts)) if args.prompts else None
    recipe = Recipe(
        conversations=args.conversations, max_len=args.max_len, seed=args.seed,
        seconds=getattr(args, "generation_limit", None),
    )  # fmt: skip
    slots = args.slots or (256 if device == "cuda" else 8)
    began = time.perf_counter()

    def say(what: str, done: int, total: int) -> None:
        print(f"{what}: {done}/{total} after {time.perf_counter() - began:.0f} s", file=sys.stderr)

    print(
        f"the model writes {args.conversations} conversations of up to {args.max_len} tokens, {slots} at a time; "
        "--conversations and --max-len ask for less",
        file=sys.stderr,
    )
    options: dict[str, Any] = {"num_pages": slots * (args.max_len // 32 + 2)}
    if device == "cuda":
        options["slot_buckets"] = (32, slots) if slots > 32 else (slots,)
    with LLM(args.model, device=device, max_slots=slots, max_model_len=args.max_len, **options) as llm:
        corpus = generate_corpus(llm, recipe, prompts=prompts, progress=say)
    corpus.save(path)
    return corpus


def _head(kind: str, args: Any, teacher: Teacher, corpus: Corpus) -> DraftHead:
    from slipstream.train.dspark import DSparkHead
    from slipstream.train.eagle3 import Eagle3Head, frequent_ids

    if kind == "eagle3":
        ids = frequent_ids(corpus.token_NT, corpus.answer_NT, teacher.model_config.vocab_size, args.draft_vocab)
        return Eagle3Head(teacher, ids, steps=args.unroll, inner=args.intermediate_size)
    mask = args.mask_token_id if args.mask_token_id is not None else _unused_id(teacher, corpus)
    return DSparkHead(
        teacher, mask_token_id=mask, block=args.block_size, layers=args.layers, rank=args.markov_rank,
        inner=args.intermediate_size, heads=args.heads, kv_heads=args.kv_heads, anchors=args.anchors, seed=args.seed,
    )  # fmt: skip


def _unused_id(teacher: Teacher, corpus: Corpus) -> int:
    """The lowest id above the usual special ones that no sequence holds."""
    import torch

    counts = torch.bincount(corpus.token_NT.flatten(), minlength=teacher.model_config.vocab_size)
    unused = (counts == 0).nonzero().flatten()
    if len(unused) == 0:
        raise ConfigError("every token id occurs in the corpus; name one for the mask with --mask-token-id")
    return int(unused[0])


def _calibrate(head: DraftHead, teacher: Teacher, held_out: Corpus, out: Path, args: Any) -> None:
    from slipstream.train.calibrate import fit_temperatures, held_out_blocks
    from slipstream.train.dspark import DSparkHead

    assert isinstance(head, DSparkHead)
    found = fit_temperatures(*held_out_blocks(head, teacher, held_out))
    found.save(out / "temperatures.json", args.prompts or "self-generated")
    shown = ", ".join(f"{t:.2f}" for t in found.temperatures)
    print(f"confidence temperatures {shown}; ECE {found.ece_before[-1]:.3f} to {found.ece_after[-1]:.3f}")


def _facts(
    kind: str, args: Any, options: TrainOptions, corpus: Corpus, steps: int, accepted: list[float]
) -> dict[str, Any]:
    """What a model card needs. Names without their folders: a draft is given away."""
    given = "named corpora" if args.corpus else "self-generated"
    return {
        "kind": kind, "target": Path(args.model).name if args.model else "default", "steps": steps,
        "batch": options.batch, "lr": options.lr, "seed": options.seed, "conversations": len(corpus),
        "answer_tokens": corpus.answer_tokens, "data": Path(args.prompts).name if args.prompts else given,
        "acceptance": accepted,
    }  # fmt: skip


class _Bar:
    """One line on stderr; on a terminal it is rewritten."""

    def __init__(self, total: int) -> None:
        self.total, self.shown = total, 0.0

    def __call__(self, step: int, total: int, loss: float, acceptance: list[float]) -> None:
        terminal = sys.stderr.isatty()
        now = time.monotonic()
        if not terminal and now - self.shown < 5 and step != total:
            return
        self.shown = now
        share = ", ".join(f"{a:.2f}" for a in acceptance)
        line = f"step {step}/{total}  loss {loss:.3f}  agreement {share}"
        print(f"\r{line}" if terminal else line, end="" if terminal and step != total else "\n", file=sys.stderr)
        sys.stderr.flush()
