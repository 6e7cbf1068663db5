"""`load_model`: from a path or hub id to a model that runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import ConfigError, ModelLoadError, UnsupportedError
from slipstream.models.config import ModelConfig, parse_hf_config, read_hf_config, read_json
from slipstream.models.default import default_model
from slipstream.models.dummy import DummyWeights
from slipstream.models.gguf import GGUFFile
from slipstream.models.gguf_model import GGUFWeights, read_gguf_config
from slipstream.models.hub import fetch, is_hub_id
from slipstream.models.protocol import Model
from slipstream.models.registry import model_class
from slipstream.models.safetensors_io import SafetensorsWeights
from slipstream.models.weights import WeightBuilder, WeightSource

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
HAS_HEAD = 'the checkpoint has a prediction head (mtp.*); draft="mtp" drafts with it'
# Tensors that old exporters wrote although they follow from the config.
_DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model and what came with it.

    source: the resolved file or folder. tokenizer_dir: folder with a `tokenizer.json`, else None; gguf_path:
    the GGUF file whose metadata holds the tokenizer, else None. chat_template: jinja source or None.
    weights: how they are kept ("safetensors in bfloat16", "GGUF Q4_0 dequantised to bfloat16").
    notes: one line for each thing that was decided on the user's behalf, to be shown at start-up.
    """

    model: Model
    config: ModelConfig
    source: Path
    generation_config: dict[str, Any]
    tokenizer_dir: Path | None
    gguf_path: Path | None
    chat_template: str | None
    weights: str
    notes: list[str] = field(default_factory=list)


def load_model(
    source: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    revision: str | None = None,
    seed: int = 0,
    memory_bytes: int | None = None,
) -> LoadedModel:
    """Load a model.

    source: an HF directory, a `.gguf` file, a hub id, a `config.json` (dummy only), or None for the default
    model. dtype: float32, float64, bfloat16 or auto: the checkpoint's own; for 4-bit GGUF on the CPU, packed
    weights with bfloat16 activations. load_format "dummy": random weights from the config and `seed`.
    memory_bytes: what the weights may take on the device; None is no limit.
    Raises ModelLoadError, UnsupportedError or ConfigError with one line that names the value.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} must be auto, {', '.join(DTYPES)}")
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format={load_format!r} must be auto or dummy")
    place = _device(device)
    path = resolve_source(source, revision)
    with torch.inference_mode():
        if path.suffix == ".gguf":
            return _load_gguf(path, dtype, place, load_format, seed, memory_bytes)
        return _load_folder(path, dtype, place, load_format, seed, memory_bytes)


def resolve_source(source: str | Path | None, revision: str | None = None, *, draft: bool = False) -> Path:
    """The file or folder that `source` means; fetches from the hub what is no path here.

    draft: an old `pytorch_model.bin` will do.
    """
    if source is None:
        return default_model()
    text = str(source)
    path = Path(text).expanduser()
    if not text.strip():
        raise ModelLoadError("the model name is empty")
    if path.exists():
        if not path.is_file() and not path.is_dir():
            raise ModelLoadError(f"{path} is neither a file nor a folder")
        if path.is_file() and path.suffix != ".gguf" and path.name != "config.json":
            raise ModelLoadError(f"{path} is neither a .gguf file, a config.json nor a folder with one")
        return path
    if isinstance(source, str) and is_hub_id(text):
        return fetch(text, revision, bins=draft)
    raise ModelLoadError(f"model {text!r} does not exist")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not a device; use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but there is no CUDA device here; use cpu")
    return device


def check_memory(
    source: WeightSource,
    config: ModelConfig,
    dtype: str,
    device: torch.device,
    memory_bytes: int | None,
    unused: tuple[str, ...] = (),
) -> None:
    """ConfigError with both numbers when the weights do not fit into `memory_bytes` of the device.

    unused: prefixes of tensors that are not loaded.
    """
    if memory_bytes is None:
        return
    names = source.names() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    names = {name for name in names if not name.startswith(unused)}
    need = sum(math.prod(source.shape(name)) for name in names) * DTYPES[dtype].itemsize
    if need > memory_bytes:
        raise ConfigError(
            f"the weights need {need / 2**20:.1f} MiB in {dtype}, and {memory_bytes / 2**20:.1f} MiB are left on "
            f"{device.type}; use a smaller model, a narrower dtype, or more GPU memory"
        )


def _load_folder(
    path: Path, dtype: str, device: torch.device, load_format: str, seed: int, memory_bytes: int | None
) -> LoadedModel:
    folder = path if path.is_dir() else path.parent
    config = read_hf_config(folder) if path.is_dir() else parse_hf_config(read_json(path))
    cls = model_class(config.architecture)
    notes: list[str] = []
    source: WeightSource
    if load_format == "dummy":
        source = DummyWeights(config, seed=seed, device=device)
        notes.append(f"weights are random (load_format=dummy, seed {seed})")
    else:
        fp8 = fp8_block(config.quantization)
        if fp8 is not None:
            notes.append("FP8 weights are dequantised to bfloat16 at load")
        source = SafetensorsWeights(folder, fp8_block=fp8)
    wanted = dtype
    if wanted == "auto":
        wanted = "bfloat16" if config.quantization else config.torch_dtype or "float32"
        if wanted == "float16":
            wanted = "bfloat16"
            notes.append("float16 weights are rounded to bfloat16; dtype=float32 keeps them exact")
    unused: tuple[str, ...] = getattr(cls, "unused", ())
    check_memory(source, config, wanted, device, memory_bytes, unused)
    weights = WeightBuilder(source, device=device, dtype=DTYPES[wanted])
    model = cls(config, weights)
    weights.finish((*_DERIVED, "lm_head.weight") if config.tie_word_embeddings else _DERIVED, unused)
    there = [part for part in unused if any(name.startswith(part) for name in source.names())]
    aside = [part for part in there if part != "mtp."]
    if "mtp." in there:
        notes.append(HAS_HEAD)
    if aside:
        notes.append(f"tensors of other parts of the checkpoint are left aside: {', '.join(p + '*' for p in aside)}")
    has_tokenizer = (folder / _TOKENIZER_FILES[0]).is_file()
    return LoadedModel(
        model=model,
        config=config,
        source=path,
        generation_config=dict(config.generation),
        tokenizer_dir=folder if has_tokenizer else None,
        gguf_path=None,
        chat_template=_chat_template(folder),
        weights=f"{'random' if load_format == 'dummy' else 'safetensors'} in {wanted}",
        notes=notes,
    )


@dataclass(frozen=True, kw_only=True)
class GGUFPlan:
    """How a GGUF file's weights are kept. packed: 4-bit stays packed; else everything is in `dtype`."""

    packed: bool
    dtype: str
    weights: str
    notes: tuple[str, ...]


def plan_gguf(types: Collection[str], *, four_bit: bool, dtype: str, device: str, load_format: str) -> GGUFPlan:
    """Decide it from the tensor types in the file ("Q4_0", "F32" ...), the dtype asked for and the device's type.

    Packed 4-bit products exist on the CPU only, so on a GPU every quantised tensor is dequantised, and that is said:
    the weights then take up to seven times the file's size.
    """
    exact = set(types) <= {"F32"}
    quantised = sorted(set(types) - {"F32", "F16", "BF16"})
    wanted = dtype if dtype != "auto" else "float32" if exact and device == "cpu" else "bfloat16"
    if load_format == "dummy":
        return GGUFPlan(packed=False, dtype=wanted, weights=f"random in {wanted}", notes=())
    names = ", ".join(quantised or sorted(set(types)))
    if dtype == "auto" and device == "cpu" and four_bit:
        note = "4-bit weights stay packed, activations are bfloat16"
        return GGUFPlan(packed=True, dtype=wanted, weights=f"GGUF {names}, 4-bit packed", notes=(note,))
    if not quantised:
        return GGUFPlan(packed=False, dtype=wanted, weights=f"GGUF {names} in {wanted}", notes=())
    where = " on the GPU" if device == "cuda" else ""
    note = f"{'4-bit' if four_bit else 'quantised'} weights are dequantised to {wanted}{where}: {names}"
    return GGUFPlan(packed=False, dtype=wanted, weights=f"GGUF {names} dequantised to {wanted}", notes=(note,))


def _load_gguf(
    path: Path, dtype: str, device: torch.device, load_format: str, seed: int, memory_bytes: int | None
) -> LoadedModel:
    file = GGUFFile(path)
    config = read_gguf_config(file)
    cls = model_class(config.architecture)
    stored = GGUFWeights(file, config)
    plan = plan_gguf(
        {stored.type(name) for name in stored.names()},
        four_bit=any(stored.packed_kind(name) == "int4" for name in stored.names()),
        dtype=dtype, device=device.type, load_format=load_format,
    )  # fmt: skip
    notes = list(plan.notes)
    source: WeightSource = stored
    if load_format == "dummy":
        source = DummyWeights(config, seed=seed, device=device)
        notes.append(f"weights are random (load_format=dummy, seed {seed})")
    check_memory(source, config, plan.dtype, device, memory_bytes)
    weights = WeightBuilder(source, device=device, dtype=DTYPES[plan.dtype], packed=plan.packed)
    model = cls(config, weights)
    weights.finish()
    template = file.metadata.get("tokenizer.chat_template")
    return LoadedModel(
        model=model,
        config=config,
        source=path,
        generation_config=dict(config.generation),
        tokenizer_dir=None,
        gguf_path=path,
        chat_template=template if isinstance(template, str) else None,
        weights=plan.weights,
        notes=notes,
    )


def fp8_block(q: Any) -> tuple[int, int] | None:
    """Block of an FP8 checkpoint by its `quantization_config`, None without one; other methods are refused by name."""
    if not q:
        return None
    method = q.get("quant_method") if isinstance(q, Mapping) else None
    if method != "fp8":
        raise UnsupportedError(f"quantization {method!r} is not supported; the known one is 'fp8' with weight blocks")
    block = q.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise UnsupportedError(
            f"fp8 quantization with weight_block_size={block!r} is not supported; it needs two sizes"
        )
    return block[0], block[1]


def _chat_template(folder: Path) -> str | None:
    """`chat_template.jinja`, else the one in `tokenizer_config.json` (of several, "default")."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not (folder / _TOKENIZER_FILES[1]).is_file():
        return None
    template = read_json(folder / _TOKENIZER_FILES[1]).get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
