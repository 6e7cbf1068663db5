"""Architectures by name. Classes are imported on use; third parties add theirs as entry points."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from slipstream.errors import ModelLoadError
from slipstream.models.protocol import Model

GROUP = "slipstream.models"
"""Entry point group: the name is the architecture in `config.json`, the value "module:Class" of a Model."""

MODELS: dict[str, str] = {
    "Gemma3ForCausalLM": "slipstream.models.gemma3:Gemma3",
    "LlamaForCausalLM": "slipstream.models.llama:Llama",
    "MistralForCausalLM": "slipstream.models.llama:Llama",
    "Qwen2ForCausalLM": "slipstream.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "slipstream.models.qwen3:Qwen3",
    "Qwen3NextForCausalLM": "slipstream.models.qwen3_next:Qwen3Next",
    "Qwen3_5ForCausalLM": "slipstream.models.qwen3_5:Qwen3_5",
    "Qwen3_5ForConditionalGeneration": "slipstream.models.qwen3_5:Qwen3_5",
}


def model_class(architecture: str) -> type[Model]:
    """The class that runs `architecture`; ModelLoadError lists the known names."""
    target = MODELS.get(architecture)
    if target is None:
        found = {p.name: p for p in entry_points(group=GROUP)}
        if architecture in found:
            loaded: type[Model] = found[architecture].load()
            return loaded
        known = ", ".join(sorted({*MODELS, *found}))
        raise ModelLoadError(f"architecture {architecture!r} is not supported; the known ones are {known}")
    module, name = target.split(":")
    cls: type[Model] = getattr(import_module(module), name)
    return cls
