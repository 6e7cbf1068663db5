"""`python -m bench.clinic`: runs the registered cases on this machine's GPU, or fills the README from a result."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.clinic import EngineCase, cases
from bench.clinic.render import table, update_readme

REPO = Path(__file__).resolve().parents[2]
MODEL = "bench/configs/llama-3.1-8b"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench.clinic", description=__doc__)
    p.add_argument("--json", metavar="FILE", help="write the result here, in the style of bench/results")
    p.add_argument("--model", default=MODEL, metavar="DIR", help=f"shape of the engine cases (default {MODEL})")
    p.add_argument("--batch", type=int, default=8, help="sequences of the engine cases (default 8)")
    p.add_argument("--only", metavar="NAME,NAME", help="only these cases")
    p.add_argument("--list", action="store_true", help="print the names of the cases and end")
    p.add_argument("--commit", help="commit to write down, where there is no git repository")
    p.add_argument("--readme", metavar="FILE", help="no measuring: write the README's section from a JSON result")
    return p


def main(argv: list[str] | None = None) -> int:
    given = parser().parse_args(argv)
    if given.readme:
        file = Path(given.readme).resolve()
        source = file.relative_to(REPO) if file.is_relative_to(REPO) else file
        update_readme(REPO / "README.md", json.loads(file.read_text()), source.as_posix())
        return 0
    try:
        chosen = list(cases(given.only.split(",") if given.only else None))
    except ValueError as error:
        print(f"clinic: {error}", file=sys.stderr)
        return 2
    if given.list:
        print("\n".join(case.name for case in chosen))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("clinic: measuring needs a CUDA GPU; tests/unit/bench/test_clinic.py runs the pairs without one",
              file=sys.stderr)  # fmt: skip
        return 2
    result = run(chosen, given)
    print(table(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def run(chosen: list[Any], given: argparse.Namespace) -> dict[str, Any]:
    """Measure the cases. A case that fails ends the run: half a table would look like a whole one."""
    import torch

    from bench.clinic.loop import Loop
    from bench.clinic.measure import measure_engine, measure_pair

    measured, loop = [], None
    for case in chosen:
        facts: dict[str, Any] = {"name": case.name, "about": case.about, "rule": case.rule}
        print(f"clinic: {case.name}", file=sys.stderr, flush=True)
        if isinstance(case, EngineCase):
            facts |= {"where": given.model, "options": case.options, "after_options": case.after_options}
            measured.append({**facts, **measure_engine(case, given.model, batch=given.batch)})
        else:
            loop = loop or Loop("cuda", captured=True)
            measured.append({**facts, "where": "loop", **measure_pair(case, loop)})
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python -m bench.clinic" + (f" --only {given.only!r}" if given.only else ""),
        "commit": given.commit or commit(),
        "hardware": {"gpu": torch.cuda.get_device_name(), "cpus": os.cpu_count()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "batch": given.batch,
        "cases": measured,
    }


def commit() -> str | None:
    """The repository's commit, marked when files differ from it; None outside a repository."""
    try:
        git = ["git", "-C", str(REPO)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


if __name__ == "__main__":
    sys.exit(main())
