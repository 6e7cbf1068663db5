"""The training text: token sequences with a mask of what the model itself wrote.

Everything is on policy: the answers, and unless a file gives prompts the user turns too, are the target's own
(the model is asked to go on after the chat template's user header). Answers that do little but repeat themselves are
dropped: they would teach a draft nothing else.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """token_NT int64 and answer_NT bool [N, T], padded on the right with token 0 and False.

    answer: the token was written by the model after the prompt, so a draft has to predict it. length_N int64.
    """

    token_NT: Tensor
    answer_NT: Tensor
    length_N: Tensor

    def __len__(self) -> int:
        return self.token_NT.shape[0]

    @property
    def answer_tokens(self) -> int:
        return int(self.answer_NT.sum())

    @classmethod
    def pack(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], max_len: int) -> Corpus:
        """From (prompt ids, answer ids); sequences are cut at max_len, those without an answer left are dropped."""
        rows = [(list(p), list(a)) for p, a in pairs if len(p) < max_len and a]
        token_NT = torch.zeros(len(rows), max_len, dtype=torch.int64)
        answer_NT = torch.zeros(len(rows), max_len, dtype=torch.bool)
        length_N = torch.zeros(len(rows), dtype=torch.int64)
        for i, (prompt, answer) in enumerate(rows):
            ids = (prompt + answer)[:max_len]
            token_NT[i, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            answer_NT[i, len(prompt) : len(ids)] = True
            length_N[i] = len(ids)
        return cls(token_NT=token_NT, answer_NT=answer_NT, length_N=length_N)

    def split(self, held_out: int) -> tuple[Corpus, Corpus]:
        """The last `held_out` sequences apart, for calibration."""
        if not 0 < held_out < len(self):
            raise ConfigError(f"held_out={held_out} must be between 1 and {len(self) - 1}, the sequences there are")
        cut = len(self) - held_out
        return self.take(torch.arange(cut)), self.take(torch.arange(cut, len(self)))

    def take(self, index_M: Tensor) -> Corpus:
        return Corpus(
            token_NT=self.token_NT[index_M], answer_NT=self.answer_NT[index_M], length_N=self.length_N[index_M]
        )

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and answers up to the longest sequence, on the device."""
        longest = int(self.length_N.max())
        return self.token_NT[:, :longest].to(device), self.answer_NT[:, :longest].to(device)

    def save(self, path: Path) -> None:
        """As safetensors, without the padding: tokens one after the other, and two lengths per sequence."""
        if not len(self):
            raise ConfigError("no answer is left for the corpus; give more prompts or a larger max_len")
        inside_NT = torch.arange(self.token_NT.shape[1]) < self.length_N[:, None]
        small = torch.uint16 if int(self.token_NT.max()) < 1 << 16 else torch.int32
        prompt_N = self.length_N - self.answer_NT.sum(1)
        write_tensors(
            {"tokens": self.token_NT[inside_NT].to(small), "length": self.length_N, "prompt_length": prompt_N}, path
        )

    @classmethod
    def load(cls, *paths: Path) -> Corpus:
        """One corpus from one or several files. Raises ConfigError that names the file."""
        pairs: list[tuple[list[int], list[int]]] = []
        for path in paths:
            tensors = load_tensors(path)
            for name in ("tokens", "length", "prompt_length"):
                if name not in tensors:
                    raise ConfigError(f"{path} is no training corpus: it lacks the tensor {name!r}")
            lengths_N, prompts_N = tensors["length"], tensors["prompt_length"]
            ids, at = tensors["tokens"].to(torch.int64).flatten().tolist(), 0
            if lengths_N.dim() != 1 or lengths_N.shape != prompts_N.shape or int(lengths_N.sum()) != len(ids):
                raise ConfigError(f"{path} is no training corpus: its lengths do not add up to its {len(ids)} tokens")
            if bool(((prompts_N < 0) | (prompts_N > lengths_N)).any()):
                raise ConfigError(f"{path} is no training corpus: a prompt_length is outside its sequence")
            for length, prompt in zip(lengths_N.tolist(), prompts_N.tolist(), strict=True):
                pairs.append((ids[at : at + prompt], ids[at + prompt : at + length]))
                at += length
        if not pairs:
            raise ConfigError(f"{', '.join(map(str, paths))}: the corpus holds no sequences")
        return cls.pack(pairs, max(len(p) + len(a) for p, a in pairs))


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that is whole or not there: a run that is killed leaves no half of one under its name.

    Raises OSError where it cannot be written; safetensors has an exception of its own for a full disk.
    """
    new = path.with_name(path.name + ".new")
    try:
        save_file(dict(tensors), new, metadata=metadata)
        new.replace(path)
    except SafetensorError as error:
        new.unlink(missing_ok=True)
        raise OSError(errno.EIO, f"{path}: {error}") from None


def write_text(text: str, path: Path) -> None:
    """A small file that is whole, or as it was before. Raises OSError where it cannot be written."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Raises ConfigError that names the file where it is missing or damaged."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None


def loops(ids: Sequence[int], n: int = 4, least: float = 0.5) -> bool:
    """Whether fewer than `least` of the n-grams of `ids` are distinct."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return bool(grams) and len(set(grams)) < least * len(grams)
