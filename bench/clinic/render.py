"""Tables of clinic results: for the terminal, and the README's section between two markers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- clinic:begin -->", "<!-- clinic:end -->"
AFTER_SECTION = "## What is built"
"""Where the section goes when the README has no markers yet: before this heading."""

COLUMNS = (
    ("idle share", "device_idle_share", "{:.1%}"),
    ("kept in pauses", "pause_kept", "{:.1%}"),
    ("syncs", "syncs_per_step", "{:g}"),
    ("findings", "findings_per_step", "{:g}"),
    ("host µs", "host_us", "{:.0f}"),
    ("step ms", "step_ms", "{:.3f}"),
)


def cell(case: dict[str, Any], key: str, form: str) -> str:
    """ "12.0% → 0.4%"; "-" where a figure does not apply."""
    pair = [case[side].get(key) for side in ("before", "after")]
    return " → ".join("-" if value is None else form.format(value) for value in pair)


def table(result: dict[str, Any]) -> str:
    """Plain text, one line per case."""
    head = ("case", *(name for name, _, _ in COLUMNS))
    rows = [(case["name"], *(cell(case, key, form) for _, key, form in COLUMNS)) for case in result["cases"]]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip()
                     for row in (head, *rows))  # fmt: skip


def markdown(result: dict[str, Any], source: str) -> str:
    """The README's section. source: the JSON file's path as it stands in the repository."""
    lines = [
        "## Clinic",
        "",
        "What slow forms cost, and what their fix gives back, each as before → after on one "
        f"{result['hardware']['gpu']}: share of time the device idles, throughput kept while the host pauses, stream "
        "and device synchronisations and findings of the auditor per step, host time and step time. "
        f"Measured {result['date']} with `{result['command']}`; numbers in [{source}]({source}).",
        "",
        "| form | " + " | ".join(name for name, _, _ in COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for case in result["cases"]:
        cells = [cell(case, key, form) for _, key, form in COLUMNS]
        lines.append(f"| {case['name']} | " + " | ".join(cells) + " |")
    engine = [case for case in result["cases"] if case["where"] != "loop"]
    notes = sorted({f"`{case['where']}`" for case in engine})
    lines += [
        "",
        f"The first {len(engine)} rows are this engine ({', '.join(notes)}), batch {result['batch']}, with a pause of "
        "20 ms every 50 frames and 8 frames of run-ahead; the others a small decode loop around captured layers, "
        "paused for four steps every 50. All cases: [bench/clinic](bench/clinic).",
    ]
    return "\n".join(lines)


def update_readme(readme: Path, result: dict[str, Any], source: str) -> None:
    """Rewrite what stands between the markers, or put the section before `AFTER_SECTION`.

    Raises ValueError when the README has neither.
    """
    text = readme.read_text(encoding="utf-8")
    section = f"{BEGIN}\n{markdown(result, source)}\n{END}"
    marked = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.S)
    if marked.search(text):
        text = marked.sub(lambda _: section, text, count=1)
    elif f"\n{AFTER_SECTION}\n" in text:
        text = text.replace(f"\n{AFTER_SECTION}\n", f"\n{section}\n\n{AFTER_SECTION}\n", 1)
    else:
        raise ValueError(f"{readme} has neither the line {BEGIN!r} nor the heading {AFTER_SECTION!r}")
    readme.write_text(text, encoding="utf-8")
