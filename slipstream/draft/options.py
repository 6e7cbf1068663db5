"""What command lines say about drafting. Imports no torch."""

from __future__ import annotations

from slipstream.errors import ConfigError

TREE_HELP = (
    "draft a tree instead of a chain: children per expanded node, levels, nodes that are kept with the root; 4,4,16 "
    "for example"
)

SCHEDULE_HELP = "verify only the drafts that pay, by a DSpark draft's confidences and by what frames cost here"

WEIGHTS_HELP = "dense: keep an EAGLE-3 head's weights; by default they get 8 bits beside packed 4-bit ones on a CPU"


def tree_values(text: str) -> dict[str, int]:
    """ "4,4,16" as the option draft_tree. Raises ConfigError for anything but three whole numbers."""
    parts = text.split(",")
    if len(parts) != 3 or not all(p.strip().isascii() and p.strip().isdigit() and len(p) <= 6 for p in parts):
        raise ConfigError(f"--draft-tree {text[:40]!r} must be three whole numbers: topk,levels,total, such as 4,4,16")
    return dict(zip(("topk", "levels", "total"), map(int, parts), strict=True))
