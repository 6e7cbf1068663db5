"""Proof without a GPU: the CUDA path of a program under fake CUDA tensors, in a process of its own.

The program is a function `module:function` that builds everything on device "cuda:0" and returns a `Program` (or
the tuple of its fields). Each frame is run, every wait in it is reported, and the custom operations it reaches are
counted. Exit codes: 0 proved, 1 findings, 2 nothing was proved (no frame ran, or an expected kernel was not reached).

Limits: recompiles cannot be seen (count them with `watch` on the CPU), nor what a kernel does inside; `is_pinned()`
is always false here, so memory counts as pinned if it was made with `pin_memory=True`, by `.pin_memory()`, or given
to `mark_staging`; values read are stand-ins (1, or True and False in turn), so one path is followed, not all.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.audit.report import AuditError, Report, Site, _is_internal

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Program:
    """What is to be proved.

    frame:   one frame, called without arguments `frames` times.
    frames:  how many; more than one shows what only a later frame does.
    kernels: custom operations that must be reached, "namespace::name".
    """

    frame: Callable[[], Any]
    frames: int = 2
    kernels: tuple[str, ...] = ()


@dataclass
class Proof:
    """The outcome. `ops`: dispatcher operations in all frames; `kernels`: calls per custom operation."""

    target: str
    report: Report
    frames: int = 0
    ops: int = 0
    kernels: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def exit_code(self) -> int:
        if self.error or self.frames == 0 or self.missing:
            return 2
        return self.report.exit_code

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "exit_code": self.exit_code,
            "frames": self.frames,
            "ops": self.ops,
            "kernels": self.kernels,
            "missing": self.missing,
            "error": self.error,
            "report": self.report.to_dict(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Proof:
        report = Report.from_dict(data["report"])
        fields = ("target", "frames", "ops", "kernels", "missing", "error")
        return cls(report=report, **{name: data[name] for name in fields})

    def table(self, stacks: bool = False) -> str:
        lines = [self.report.table(stacks)]
        lines.append(f"frames {self.frames}, operations {self.ops}")
        lines += [f"{count:>6}  {name}" for name, count in sorted(self.kernels.items())]
        lines += [f"NOT REACHED: {name}" for name in self.missing]
        if self.frames == 0:
            lines.append("no frame ran: nothing was proved")
        if self.error:
            lines.append(f"error: {self.error}")
        return "\n".join(lines)


def prove(
    target: str,
    *,
    args: Sequence[str] = (),
    frames: int | None = None,
    kernels: Sequence[str] = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Proof:
    """Run `target` ("module:function", called with the strings `args`) in a subprocess and return the proof.

    `frames` replaces the program's own number, `kernels` are required besides its own. The subprocess inherits
    `sys.path`. Raises AuditError for a malformed target; everything else that goes wrong is in `Proof.error`.
    """
    if target.count(":") != 1 or not all(target.split(":")):
        raise AuditError(f"target {target!r}: expected 'module:function'")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "proof.json"
        job = {"target": target, "args": list(args), "frames": frames, "kernels": list(kernels)}
        # No GPU may be seen: the fake device takes its place, also where there is a real one.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "slipstream.audit.proof", json.dumps(job), str(out)]
        try:
            done = subprocess.run(command, env=env, timeout=timeout_s, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return Proof(target, Report(target), error=f"no result after {timeout_s:g} s")
        if not out.exists():
            tail = "\n".join(done.stderr.strip().splitlines()[-15:])
            return Proof(target, Report(target), error=f"the process ended with {done.returncode}: {tail}")
        return Proof.from_dict(json.loads(out.read_text()))


def prove_here(
    target: str,
    build: Callable[..., Any],
    *,
    args: Sequence[str] = (),
    frames: int | None = None,
    kernels: Sequence[str] = (),
) -> Proof:
    """The proof itself, in this process. Changes the process for good (`fake.install_device_guard`)."""
    from slipstream.audit import fake, patches
    from slipstream.audit.events import World
    from slipstream.audit.runtime import Recorder
    from slipstream.audit.scope import is_staging, pop_watcher, push_watcher

    fake.install_device_guard()
    fake.plain_attention()
    proof = Proof(target, Report(target))
    recorder = Recorder(proof.report, World("cuda", is_staging), call_through=False)
    calls: Counter[str] = Counter()
    taken, token = patches.install(), push_watcher(recorder)
    try:
        with fake.fake_world(recorder, calls) as ops:
            recorder.paused = True  # building may wait as it likes
            built = build(*args)
            program = built if isinstance(built, Program) else Program(*built)
            recorder.paused = False
            count_before = ops.ops
            for _ in range(program.frames if frames is None else frames):
                _one_frame(proof, recorder, program.frame)
            proof.ops = ops.ops - count_before
    except Exception:
        proof.error = traceback.format_exc(limit=-6)
        program = Program(lambda: None)
    finally:
        pop_watcher(token)
        patches.uninstall(taken)
    proof.kernels = dict(sorted(calls.items()))
    proof.missing = sorted(k for k in {*program.kernels, *kernels} if not calls[k])
    return proof


def _one_frame(proof: Proof, recorder: Any, frame: Callable[[], Any]) -> None:
    from slipstream.audit.rules import BY_ID

    try:
        frame()
    except Exception as error:
        stack = [
            Site(f.filename, f.lineno or 0, f.name, (f.line or "").strip())
            for f in reversed(traceback.extract_tb(error.__traceback__))
            if not _is_internal(f.filename)
        ]
        detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        recorder.emit(BY_ID["unproven"], detail, stack)
    proof.frames += 1


def load_target(target: str) -> Callable[..., Any]:
    """The function that "module:function" names. Raises AuditError if there is none."""
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise AuditError(f"target {target!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise AuditError(f"target {target!r} is not a function")
    return function  # type: ignore[no-any-return]


def _child(job_json: str, out: str) -> None:
    job = json.loads(job_json)
    try:
        build = load_target(job["target"])
        proof = prove_here(job["target"], build, args=job["args"], frames=job["frames"], kernels=job["kernels"])
    except AuditError as error:
        proof = Proof(job["target"], Report(job["target"]), error=str(error))
    Path(out).write_text(proof.to_json())


if __name__ == "__main__":
    # Through the imported module, so that classes of this file exist once.
    importlib.import_module("slipstream.audit.proof")._child(sys.argv[1], sys.argv[2])
