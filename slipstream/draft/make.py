"""The drafter that a configuration names, from its loaded parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slipstream.config import EngineConfig, LLMConfig
from slipstream.draft.detect import Head
from slipstream.draft.ngram import NgramDrafter
from slipstream.draft.protocol import ConfidentDrafter, Drafter
from slipstream.draft.tree import TreeShape
from slipstream.errors import ConfigError
from slipstream.memory.kv import KVPages
from slipstream.models.loader import LoadedModel

if TYPE_CHECKING:
    from slipstream.kernels.workspace import Workspace


def make_drafter(
    config: LLMConfig,
    engine: EngineConfig,
    *,
    draft: LoadedModel | None,
    head: Head | None,
    shape: TreeShape | None,
    pages: Callable[[Any], KVPages],
    device: torch.device,
    real: torch.dtype,
    workspace: Workspace | None,
) -> Drafter:
    """draft, head: the loaded draft model or head, where the draft is one. shape: of trees. pages: a model's cache.

    Raises ConfigError for options that the drafter does not take.
    """
    if head is not None:
        known = getattr(head.drafter, "options", ())
        for name in config.draft_options:
            if name not in known:
                raise ConfigError(f"this kind of draft takes no option {name!r}; known: {', '.join(known) or 'none'}")
        make = head.drafter if shape is None else partial(head.tree, shape=shape)
        if engine.confidence_schedule:
            make = partial(make, confident=True)
        made: Drafter = make(
            head.model, kv=pages(head.model), max_drafts=engine.num_drafts,
            max_len=engine.max_model_len, slots=engine.max_slots, real=real, workspace=workspace,
            **config.draft_options,
        )  # fmt: skip
        return made
    if draft is not None:
        from slipstream.draft.standalone import StandaloneDrafter

        if config.draft_options:
            raise ConfigError(f"a draft model takes no draft_options, got {sorted(config.draft_options)}")
        kv = pages(draft.model)
        return StandaloneDrafter(draft.model, kv=kv, max_drafts=engine.num_drafts, real=real, workspace=workspace)
    if config.draft == "ngram":
        ngram = {"min_n", "max_n", "gate", "row_cost"}
        for name in config.draft_options:
            if name not in ngram:
                raise ConfigError(f"unknown n-gram option {name!r}; known: {', '.join(sorted(ngram))}")
        return NgramDrafter(slots=engine.max_slots, max_drafts=engine.num_drafts, device=device, **config.draft_options)
    if config.draft == "suffix":
        from slipstream.draft.suffix import SuffixDrafter

        for name in config.draft_options:
            if name not in SuffixDrafter.options:
                raise ConfigError(f"unknown suffix option {name!r}; known: {', '.join(SuffixDrafter.options)}")
        return SuffixDrafter(max_drafts=engine.num_drafts, **config.draft_options)
    if callable(config.draft):
        make = config.draft if shape is None else partial(config.draft, shape=shape)
        made = make(slots=engine.max_slots, max_drafts=engine.num_drafts, max_len=engine.max_model_len, device=device)
        confident = isinstance(made, ConfidentDrafter) and made.confident
        if engine.confidence_schedule and not confident:
            raise ConfigError(f"confidence_schedule=True needs confidences; {type(made).__name__} gives none")
        if isinstance(made, Drafter):
            return made
    raise ConfigError(
        f'draft={config.draft!r} is not a drafter; use None, "ngram", "suffix", "mtp" or the path of a draft'
    )
