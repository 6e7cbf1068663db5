"""Loss and acceptance over training, as a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.train.loop import History


def check() -> None:
    """Raises ConfigError that names the extra when matplotlib is missing: before hours of training, not after them."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'slipstream[train]'")


def plot(history: History, path: Path, title: str) -> Path:
    """Write a PNG. Raises ConfigError that names the extra when matplotlib is missing."""
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(history.step, history.loss)
    left.set(xlabel="step", ylabel="loss", title=title)
    for k in range(len(history.acceptance[0]) if history.acceptance else 0):
        right.plot(history.step, [a[k] for a in history.acceptance], label=f"draft {k + 1}")
    right.set(xlabel="step", ylabel="agrees with the target", title="greedy, by position", ylim=(0, 1))
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path
