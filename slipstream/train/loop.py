"""The training loop: AdamW on float32 masters, cosine schedule, resumable at a step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.train.corpus import Corpus, load_tensors, write_tensors, write_text
from slipstream.train.layers import DraftHead
from slipstream.train.ranks import Ranks
from slipstream.train.step import LENGTHS, CapturedStep, EagerStep, Step
from slipstream.train.teacher import Teacher

_POOL = 32
"""Batches whose sequences are sorted by length together."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """batch: sequences of middling length per step; a step takes more of short ones and fewer of long ones, see
    `batches`. steps: optimiser steps. warmup: share of them. checkpoint_every: steps, 0 never.

    overlap_from: share of the steps after which a head's late loss is used. time_limit: seconds after which training
    stops although steps are left; the schedule then follows the clock, so that the rate still ends at zero.
    """

    steps: int = 1000
    batch: int = 64
    lr: float = 1e-3
    warmup: float = 0.04
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 200
    overlap_from: float = 1 / 3
    time_limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.checkpoint_every < 0:
            raise ConfigError(f"checkpoint_every={self.checkpoint_every} must be at least 0")
        if self.time_limit is not None and not self.time_limit > 0:
            raise ConfigError(f"time_limit={self.time_limit} must be above 0 seconds")
        if not 0 < self.lr < 1:
            raise ConfigError(f"lr={self.lr} must be between 0 and 1")


@dataclass
class History:
    """What was seen on the way, one entry per logged step."""

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    acceptance: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0


def learning_rate(done: float, options: TrainOptions) -> float:
    """Linear warm-up, then a cosine to zero. done: share of the run that lies behind, 0 to 1."""
    if done < options.warmup:
        return options.lr * max(done, 1 / options.steps) / options.warmup
    rest = (min(done, 1.0) - options.warmup) / (1 - options.warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * rest))


def batches(length_N: Tensor, options: TrainOptions, multiple: int = 1) -> Iterator[Tensor]:
    """Index batches, epoch after epoch, each epoch in an order of its own; the same for the same seed.

    length_N int64. Sequences of like length stand together, so that little of a batch is padding, and a batch holds as
    many as give about options.batch times the mean length in tokens, padding included. Every sequence comes once per
    epoch. multiple: lengths are padded up to multiples of it.
    """
    count, epoch = len(length_N), 0
    room = _room(length_N, options)
    length_N = (length_N + multiple - 1) // multiple * multiple
    while True:
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
        order = torch.randperm(count, generator=generator)
        for pool in order.split(max(options.batch * _POOL, 1)):
            ranked = pool[torch.argsort(length_N[pool], stable=True)]
            made, at = [], 0
            while at < len(ranked):
                size = max(1, room // max(1, int(length_N[ranked[at]])))
                # The longest of the batch decides: shrink until it fits.
                while size > 1 and size * int(length_N[ranked[min(at + size, len(ranked)) - 1]]) > room:
                    size -= 1
                made.append(ranked[at : at + size])
                at += size
            for i in torch.randperm(len(made), generator=generator).tolist():
                yield made[i]
        epoch += 1


def _room(length_N: Tensor, options: TrainOptions) -> int:
    """Tokens of a batch."""
    return max(1, round(options.batch * float(length_N.float().mean())))


def train(
    head: DraftHead,
    teacher: Teacher,
    corpus: Corpus,
    options: TrainOptions,
    *,
    folder: Path | None = None,
    progress: Callable[[int, int, float, list[float]], None] | None = None,
    ranks: Ranks | None = None,
) -> History:
    """Train `head` in place. folder: where checkpoints go and from where training resumes when one is there.

    ranks: the processes that do it together, which have begun with the same weights; a step is a batch of each.

    Raises ConfigError when the checkpoint is of other options or another corpus.
    """
    device = teacher.embed_VH.device
    parameters = [p for _, p in sorted(head.named_parameters())]
    captured = device.type == "cuda" and (ranks is None or ranks.size == 1)
    optimizer = torch.optim.AdamW(
        parameters, lr=torch.tensor(options.lr, device=device) if captured else options.lr, betas=options.betas,
        weight_decay=options.weight_decay, fused=device.type == "cuda", capturable=captured,
    )  # fmt: skip
    # What a checkpoint must agree with; how often it is written may differ.
    identity = {k: v for k, v in asdict(options).items() if k not in ("log_every", "checkpoint_every")}
    ranks = ranks or Ranks()
    identity = {**identity, "kind": head.kind, "sequences": len(corpus), "tokens": corpus.answer_tokens}
    identity |= {"processes": ranks.size}
    history, start = History(), 0
    if folder is not None and (folder / "state.json").is_file():
        start, history = _resume(folder, head, optimizer, identity)
    multiple = LENGTHS if captured else 1
    order = islice(batches(corpus.length_N, options, multiple), start * ranks.size + ranks.rank, None, ranks.size)
    advance: Step
    if captured:
        advance = CapturedStep(head, teacher, optimizer, options.clip, _room(corpus.length_N, options))
    else:
        advance = EagerStep(head, teacher, optimizer, options.clip, ranks)
    began, spent = time.perf_counter(), history.seconds
    for step in range(start, options.steps):
        index_B = next(order)
        done = step / options.steps
        if options.time_limit is not None:
            done = ranks.furthest(max(done, (spent + time.perf_counter() - began) / options.time_limit), device)
        head.overlap = done >= options.overlap_from
        seen = advance(corpus.take(index_B), learning_rate(done, options))
        last = step + 1 == options.steps or done >= 1
        if step % options.log_every == 0 or last:
            value, accepted = float(seen.loss), seen.acceptance.tolist()
            if not math.isfinite(value):
                raise ConfigError(f"the loss became {value} at step {step}; lower the learning rate ({options.lr})")
            history.step.append(step)
            history.loss.append(value)
            history.acceptance.append(accepted)
            history.seconds = spent + time.perf_counter() - began
            if progress is not None and ranks.rank == 0:
                progress(step + 1, options.steps, value, accepted)
        due = options.checkpoint_every and ((step + 1) % options.checkpoint_every == 0 or last)
        if folder is not None and due and ranks.rank == 0:
            _checkpoint(folder, head, optimizer, identity, step + 1, history)
        if last:
            break
    return history


@torch.no_grad()
def evaluate(head: DraftHead, teacher: Teacher, corpus: Corpus, batch: int = 16) -> list[float]:
    """Acceptance by draft position over whole sequences, as `History.acceptance` holds it for one batch."""
    device = teacher.embed_VH.device
    total_K, weight = torch.zeros((), dtype=torch.float64), 0
    for index_B in torch.arange(len(corpus)).split(batch):
        part = corpus.take(index_B)
        token_BT, answer_BT = part.on(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=teacher.embed_VH.dtype == torch.bfloat16):
            _, metrics = head.loss(token_BT, answer_BT, teacher.features(token_BT))
        total_K = total_K + metrics["acceptance"].double().cpu() * part.answer_tokens
        weight += part.answer_tokens
    shares: list[float] = (total_K / max(1, weight)).tolist()
    return shares


def _checkpoint(
    folder: Path,
    head: DraftHead,
    optimizer: torch.optim.Optimizer,
    identity: dict[str, Any],
    step: int,
    seen: History,
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, p in sorted(head.named_parameters()):
        tensors[f"param.{name}"] = p.detach().cpu()
        for key, value in optimizer.state[p].items():
            tensors[f"{key}.{name}"] = value.detach().cpu()
    tensors["generator"] = head.generator.get_state()
    folder.mkdir(parents=True, exist_ok=True)
    # Both files are replaced, the JSON last: a run that is stopped in between resumes from the earlier pair.
    name = f"state-{step}.safetensors"
    write_tensors({k: v.contiguous() for k, v in tensors.items()}, folder / name)
    text = json.dumps({"step": step, "tensors": name, "identity": identity, "history": asdict(seen)})
    write_text(text, folder / "state.json")
    for old in folder.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink()


def _resume(
    folder: Path, head: DraftHead, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> tuple[int, History]:
    state = _state(folder / "state.json")
    wanted = json.loads(json.dumps(identity))
    for name, value in wanted.items():
        if state["identity"].get(name) != value:
            raise ConfigError(
                f"{folder} holds a run with {name}={state['identity'].get(name)!r}, this one has {value!r}; "
                f"give another folder or the same options"
            )
    tensors = load_tensors(folder / state["tensors"])
    for name, p in sorted(head.named_parameters()):
        for key, shape in (("param", p.shape), ("exp_avg", p.shape), ("exp_avg_sq", p.shape), ("step", torch.Size())):
            found = tensors.get(f"{key}.{name}")
            if found is None or found.shape != shape:
                raise ConfigError(
                    f"{folder / state['tensors']} is of another draft: {key}.{name} "
                    + ("is missing" if found is None else f"has shape {list(found.shape)}, not {list(shape)}")
                )
    if "generator" not in tensors:
        raise ConfigError(
            f"{folder / state['tensors']} is damaged: it lacks 'generator'; remove {folder} to begin again"
        )
    with torch.no_grad():
        for name, p in sorted(head.named_parameters()):
            p.copy_(tensors[f"param.{name}"])
            optimizer.state[p] = {
                k: tensors[f"{k}.{name}"].to(p.device if k != "step" or p.is_cuda else "cpu")
                for k in ("step", "exp_avg", "exp_avg_sq")
            }
    head.generator.set_state(tensors["generator"])
    return state["step"], History(**state["history"])


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (ValueError, OSError):
        state = None
    if not _is_state(state):
        raise ConfigError(f"{path} is damaged; remove its folder to begin again")
    return dict(state)


def _is_state(state: Any) -> bool:
    """Whether it has all that `_checkpoint` writes, each of its kind."""
    kinds = {"step": int, "tensors": str, "identity": dict, "history": dict}
    if not isinstance(state, dict) or any(type(state.get(name)) is not kind for name, kind in kinds.items()):
        return False
    # A plain name only: the tensors lie beside it.
    if state["step"] < 0 or Path(state["tensors"]).name != state["tensors"]:
        return False
    return set(state["history"]) == {f.name for f in fields(History)} and all(
        isinstance(state["history"][name], list) for name in ("step", "loss", "acceptance")
    )


def export(head: DraftHead, folder: Path, extra: dict[str, Any] | None = None) -> Path:
    """Write config.json and model.safetensors in the released format."""
    tensors, values = head.export()
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    write_text(json.dumps({**values, **(extra or {})}, indent=2) + "\n", folder / "config.json")
    return folder
