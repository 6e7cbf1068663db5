"""Tables, targets and surroundings for `cpu_peers.py`. Pure functions over its results."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LLAMA = ("llama.cpp", "llama.cpp raw")
Engines = dict[str, dict[str, Any]]


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Mean share of each output that equals ours from its start; 1.0 is token for token."""
    shares = []
    for a, b in zip(ours, theirs, strict=False):
        same = 0
        while same < min(len(a), len(b)) and a[same] == b[same]:
            same += 1
        shares.append(same / max(len(a), len(b), 1))
    return round(sum(shares) / len(shares), 3) if shares else 0.0


def _rate(engines: Engines, name: str, label: str) -> float | None:
    value = engines.get(name, {}).get("tok_s", {}).get(label)
    return float(value) if value else None


def _batch(engines: Engines, name: str) -> float | None:
    value = engines.get(name, {}).get("batch8_tok_s")
    return float(value) if value else None


def _best(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def targets(engines: Engines) -> list[dict[str, Any]]:
    """What the project promises on a CPU, each as what, ratio, target, met; ratio None: not measured.

    Against llama.cpp the faster of its Python and its C loop counts.
    """
    labels = list(engines.get("slipstream", {}).get("tok_s", {}))
    rows: list[tuple[str, float | None, float | None, float]] = []
    for label in labels:
        ours = _rate(engines, "slipstream", label)
        rows.append((f"plain / llama.cpp, {label}", ours, _best([_rate(engines, n, label) for n in LLAMA]), 0.8))
        rows.append((f"plain / transformers, {label}", ours, _rate(engines, "transformers", label), 3.0))
    ours8 = _batch(engines, "slipstream")
    rows.append(("batch 8 / llama.cpp in sequence", ours8, _best([_batch(engines, n) for n in LLAMA]), 3.0))
    for label in labels:
        goal = 1.2 if label == "extractive" else 0.95
        ngram, plain = _rate(engines, "slipstream+ngram", label), _rate(engines, "slipstream", label)
        rows.append((f"n-gram / plain, {label}", ngram, plain, goal))
    out = []
    for what, top, bottom, target in rows:
        ratio = round(top / bottom, 3) if top and bottom else None
        met = None if ratio is None else ratio >= target
        out.append({"what": what, "ratio": ratio, "target": target, "met": met})
    return out


def table(record: dict[str, Any]) -> str:
    """Text: decode rates, ratios to our plain decoding, memory; then the targets."""
    engines: Engines = record["engines"]
    labels = list(record["prompt_tokens"])
    head = ["engine", *(f"{label} tok/s" for label in labels), "batch 8 tok/s"]
    head += [*(f"x plain, {label}" for label in labels), "peak MB", "same"]
    lines = [head]
    for name, e in engines.items():
        if "tok_s" not in e:
            lines.append([name, str(e.get("missing"))])
            continue
        line = [
            name,
            *(_text(e["tok_s"].get(label), ".1f") for label in labels),
            _text(_batch(engines, name), ".1f"),
        ]
        for label in labels:
            mine, plain = _rate(engines, name, label), _rate(engines, "slipstream", label)
            line.append(_text(mine / plain if mine and plain else None, ".2f"))
        same = e["same_prefix_as_slipstream"].values()
        line += [_text(e.get("peak_rss_mb"), ".0f"), _text(sum(same) / len(same) if same else None, ".2f")]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines if len(line) == len(head)) for i in range(len(head))]
    widths[0] = max(len(line[0]) for line in lines)
    text = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=False)) for line in lines]
    text.extend(f"{name} stopped early: {e['error']}" for name, e in engines.items() if e.get("error"))
    text.append("same: mean share of the output that equals our plain decoding from its start")
    text.append("")
    text.extend(
        f"{t['what']:<40} {_text(t['ratio'], '.2f'):>6}  target {t['target']:.2f}  "
        + {True: "met", False: "MISSED", None: "not measured"}[t["met"]]
        for t in record["targets"]
    )
    return "\n".join(text)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def commit(root: Path) -> str:
    """Commit of the checkout, "+" behind it when files differ; "unknown" outside of one."""
    try:
        run = ["git", "-C", str(root)]
        name = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        state = subprocess.run([*run, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if state.strip() else "")


def hardware(cores: int) -> dict[str, Any]:
    """Processor, used cores, memory in GiB; as far as Linux tells."""
    facts: dict[str, Any] = {"machine": platform.machine(), "cores_used": cores}
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if cpuinfo.exists():
        pairs = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        info = {key.strip(): value.strip() for key, _, value in pairs}
        flags = info.get("flags", "").split()
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
        facts.update(cpu=info.get("model name", "unknown"), flags=[f for f in wanted if f in flags])
    if meminfo.exists():
        facts["memory_gib"] = round(int(meminfo.read_text().split()[1]) / 2**20, 1)
    return facts
