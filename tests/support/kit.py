"""Tiny model directories with a tokenizer, for end-to-end tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny import write_tiny_checkpoint

VOCAB = 96


def write_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """Token i is the word `w<i>`, written with a space before it: every id list has a text of its own."""
    words = {f"w{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("w", " w"), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))


def tiny_model_dir(folder: Path, *, seed: int = 0, layers: int = 2, arch: str = "llama", **changes: Any) -> Path:
    """A random model of VOCAB tokens with its tokenizer."""
    write_tiny_checkpoint(folder, arch, seed=seed, num_hidden_layers=layers, **changes)
    write_tokenizer(folder)
    return folder


def perturb(source: Path, folder: Path, *, scale: float, seed: int = 5) -> Path:
    """A copy whose weights carry relative noise: a draft that is often, not always, right."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    noisy = {n: t + scale * t.std() * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    save_file(noisy, folder / "model.safetensors")
    return folder
