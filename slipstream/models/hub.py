"""Models by hub id, through `huggingface_hub` (extra `hub`), which honours HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE and keeps its own cache layout."""

from __future__ import annotations

import re
from pathlib import Path

from slipstream.errors import ModelLoadError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
_NOT_FILES = ["consolidated*", "*/*"]  # a second copy of the weights; other formats' folders


def is_hub_id(name: str) -> bool:
    """Whether `name` could be `owner/name` (or an old one-word id) rather than a path."""
    return _ID.fullmatch(name) is not None and not name.endswith((".gguf", ".json", ".safetensors"))


def fetch(repo_id: str, revision: str | None = None, *, bins: bool = False) -> Path:
    """Folder of a snapshot of `repo_id`; cached files are not downloaded again.

    revision: branch, tag or commit; None is the main branch. bins: `pytorch_model*.bin` too.
    Raises ModelLoadError in one line when the repository is absent or gated, the revision unknown, or the hub out
    of reach and the cache without it.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise ModelLoadError(
            f"{repo_id!r} is no file or folder here; to look for it on the hub, "
            f"install the extra: pip install 'slipstream[hub]'"
        ) from None
    shown = repo_id if revision is None else f"{repo_id} at revision {revision!r}"
    try:
        wanted = [*_FILES, "pytorch_model*.bin"] if bins else _FILES
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=wanted, ignore_patterns=_NOT_FILES)
    except GatedRepoError:
        raise ModelLoadError(f"{repo_id} is gated: ask for access on its page, then set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelLoadError(f"{repo_id} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ModelLoadError(
            f"{repo_id} is neither a path here nor a repository on the hub (a private one needs HF_TOKEN)"
        ) from None
    except LocalEntryNotFoundError:
        raise ModelLoadError(
            f"{shown} is not in the hub cache, and the hub is out of reach (offline, or HF_HUB_OFFLINE=1)"
        ) from None
    except HFValidationError as e:
        raise ModelLoadError(f"{repo_id!r} is neither a path here nor a hub id: {_line(e)}") from None
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise ModelLoadError(f"{shown} cannot be fetched from the hub: {_line(e)}") from None
    return Path(folder)


def _line(e: BaseException) -> str:
    return next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
