"""The draft that comes with the package, for the default model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "shipped" / "smollm2-135m-instruct"


def default_draft(model: str | None) -> Path | None:
    """The draft for `model`, as `LLM` takes it: None for any but the default model, or where the package lacks it."""
    if not (FOLDER / "model.safetensors").is_file():
        return None
    if model is None:
        return FOLDER
    from slipstream.models.default import HUB_ID, packaged_gguf

    packaged = packaged_gguf()
    same = packaged is not None and Path(model).expanduser().resolve() == packaged.resolve()
    return FOLDER if same or model == HUB_ID else None


def with_default_draft(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `LLM` that name no draft, with the default model's if there is one; drafting is then adaptive.

    A tree is not, and weights that are random (load_format=dummy) get no draft.
    """
    chosen = dict(options)
    none = "draft" in chosen or chosen.get("num_drafts") == 0 or chosen.get("load_format") == "dummy"
    folder = None if none or "confidence_schedule" in chosen else default_draft(chosen.get("model"))
    if folder is None:
        return chosen
    chosen["draft"] = str(folder)
    if "draft_tree" not in chosen:
        chosen.setdefault("adaptive", True)
    return chosen
