"""What kind of drafter a checkpoint holds, from its config.json; the classes are imported on use.

Third parties add a kind through the entry point group `slipstream.drafters`: the name is the architecture in
config.json, the value "module:Class" of a `HeadDrafter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from slipstream.draft.checkpoint import tensor_names
from slipstream.draft.protocol import Drafter
from slipstream.errors import ModelLoadError, UnsupportedError
from slipstream.models.config import read_json
from slipstream.models.loader import resolve_source

GROUP = "slipstream.drafters"

DRAFTERS: dict[str, str] = {
    "eagle3": "slipstream.draft.eagle3:Eagle3Drafter",
    "dflash": "slipstream.draft.dflash:BlockDrafter",
    "dspark": "slipstream.draft.dflash:BlockDrafter",
    "mtp": "slipstream.draft.mtp:MTPDrafter",
}
"""Kind -> "module:Class"; a checkpoint of none of these kinds is a language model that drafts by itself."""


TREES: dict[str, str] = dict.fromkeys(("eagle3", "mtp"), "slipstream.draft.feature_tree:FeatureTreeDrafter")
"""Kind -> its drafter of trees, which takes `shape` (a TreeShape) besides."""


class HeadDrafter(Protocol):
    """The class of a drafter that reads the target's hidden states."""

    rereads: int
    lookahead: bool

    @staticmethod
    def load(folder: Path, values: Mapping[str, Any], target: Any, *, seed: int | None) -> Any:
        """Its weights beside `target`; values: config.json. seed: random weights (load_format=dummy) with it.

        The result has `config` (a ModelConfig: layers, KV heads and head size of its cache) and `dtype`; `max_drafts`
        where it has a number of drafts of its own. The class may have `options`: names of draft_options that it takes,
        and `rounds`: `load` then takes rounded=True, and keeps weights with 8 bits.
        """

    def __call__(
        self, model: Any, *, kv: Any, max_drafts: int, max_len: int, slots: int, real: Any, workspace: Any
    ) -> Drafter: ...


@dataclass(frozen=True, kw_only=True)
class Head:
    """A loaded head: the class that drafts with it, and what that class's `load` gave. tree: the class that grows trees
    with it, None where there is none. acceptance: what it was found to have by position, where its config says so."""

    drafter: Any
    model: Any
    tree: Any = None
    acceptance: tuple[float, ...] = ()


OWN = "mtp"
"""Names the prediction head that lies in the target's own checkpoint."""


def load_head(
    source: str,
    target: Any,
    *,
    home: Path,
    revision: str | None = None,
    load_format: str = "auto",
    seed: int = 0,
    dense: bool = False,
) -> Head | None:
    """The head that `source` (as in `load_model`) holds, beside the target model; None when it is a language model.

    home: where the target came from; source "mtp" means the head there. dense: weights stay as wide as the target's
    activations; otherwise they are rounded to 8 bits beside a target whose own are packed.
    """
    path = home if source == OWN else resolve_source(source, revision, draft=True)
    if path.suffix == ".gguf":
        if source == OWN:
            raise UnsupportedError(
                f"draft='mtp' reads the head from the model's safetensors; {path.name} is a GGUF file"
            )
        return None
    folder = path if path.is_dir() else path.parent
    values = read_json(folder / "config.json" if path.is_dir() else path)
    kind = OWN if source == OWN else kind_of(values, folder)
    if kind is None:
        return None
    cls = drafter_class(kind)
    rounded = getattr(cls, "rounds", False) and getattr(target, "packed", False) and not dense
    more = {"rounded": True} if rounded else {}
    model = cls.load(folder, values, target, seed=seed if load_format == "dummy" else None, **more)
    tree = _named(TREES[kind]) if kind in TREES else None
    return Head(drafter=cls, model=model, tree=tree, acceptance=_acceptance(values))


def _acceptance(values: Mapping[str, Any]) -> tuple[float, ...]:
    """Share of drafts accepted by position, given all before them, as `slipstream train` leaves it in config.json."""
    training = values.get("slipstream_training")
    found = training.get("acceptance", []) if isinstance(training, Mapping) else []
    if not isinstance(found, list) or not all(type(a) in (int, float) and 0 <= a <= 1 for a in found):
        raise ModelLoadError(f"slipstream_training.acceptance={found!r:.80} must be a list of shares from 0 to 1")
    return tuple(float(a) for a in found)


def kind_of(values: Mapping[str, Any], folder: Path) -> str | None:
    """The kind of the drafter, None for a language model. values: its config.json."""
    named = values.get("speculators_model_type")
    if isinstance(named, str):
        return named
    names = values.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    plain = architecture.lower()
    nested = values.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if (
        "dspark" in plain
        or nested.get("projector_type") == "dspark"
        or {"dspark_block_size", "markov_rank"} & set(values)
    ):
        return "dspark"
    if "dflash" in plain or nested:
        return "dflash"
    if "eagle3" in plain or {"draft_vocab_size", "truncated_vocab_size", "eagle_config"} & set(values):
        return "eagle3"
    if architecture and architecture in {p.name for p in entry_points(group=GROUP)}:
        return architecture
    if "mtp" in plain or "nextn" in plain:
        return "mtp"
    tensors = tensor_names(folder)
    if any(n.startswith(("mtp.", "mtp_layers.")) or n.endswith(".eh_proj.weight") for n in tensors):
        # Beside the layers of a language model it is that model's, which `OWN` asks for.
        return None if any(".layers.0." in n and not n.startswith("mtp.") for n in tensors) else "mtp"
    if any(n.removeprefix("model.").startswith(("midlayer.", "layers.0.hidden_norm.")) for n in tensors):
        return "eagle3"
    if "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors:
        return "eagle"
    return None


def drafter_class(kind: str) -> Any:
    """The `HeadDrafter` class of a kind. Raises UnsupportedError that lists what there is."""
    target = DRAFTERS.get(kind)
    if target is not None:
        return _named(target)
    for point in entry_points(group=GROUP):
        if point.name == kind:
            return point.load()
    known = ", ".join(sorted(DRAFTERS))
    raise UnsupportedError(
        f"drafts of the kind {kind!r} are not supported; the known ones are ngram, suffix, a model, {known}"
    )


def _named(target: str) -> Any:
    module, name = target.split(":")
    return getattr(import_module(module), name)


def unknown_draft(name: str) -> str:
    """What to say of a draft that does not load, where it may be a misspelt word."""
    return "" if name == OWN or Path(name).expanduser().exists() else ' is neither "ngram", "suffix", "mtp" nor a draft'
