"""`slipstream audit ...`: audit a script, lint hot paths, prove a frame, or audit the engine.

    slipstream audit run script.py [args]      anybody's program, watched while it runs
    slipstream audit lint PATH...              the source forms, in hot functions
    slipstream audit prove module:function     the CUDA path under fake tensors, no GPU needed
    slipstream audit [--model ... --draft ...] the engine itself (all options go to its audit program)

Exit code 0: clean; 1: findings; 2: wrong usage, or nothing was looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.audit.report import AuditError, Report

_COMMANDS = ("run", "lint", "prove")
_ENGINE_TARGET = ["slipstream.benchmark.audit_target:main"]


def register_engine_target(target: str) -> None:
    """Name the function "module:function" that audits the engine: `main(args: list[str], trace: str | None) -> Report`.

    It may also return a finished exit code. It is imported only when `slipstream audit` runs without a subcommand.
    """
    if target.count(":") != 1 or not all(target.split(":")):
        raise AuditError(f"target {target!r}: expected 'module:function'")
    _ENGINE_TARGET[0] = target


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and never raises for a user's mistake."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and argv[0] in _COMMANDS:
            options = _parser().parse_args(argv)
            return int(options.run(options))
        return _engine(argv)
    except AuditError as error:
        print(f"slipstream audit: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # argparse
        return stop.code if isinstance(stop.code, int) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slipstream audit", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="watch a script while it runs")
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    run.add_argument("--in", dest="only", action="append", default=[], metavar="FUNCTION",
                     help="only what happens below this function (may be repeated)")  # fmt: skip
    run.add_argument("--device", default="cuda", help="the device type to watch (default: cuda)")
    run.add_argument("--frame", default="frame", help="record_function name that marks a frame in the trace")
    run.add_argument("--trace", metavar="FILE", help="also profile, and write a Chrome/Perfetto trace")
    run.set_defaults(run=_run)

    lint = commands.add_parser("lint", help="look for the source forms in hot functions")
    lint.add_argument("paths", nargs="+")
    lint.add_argument("--hot", action="append", default=[], metavar="PATTERN", help="file.py::Class.method, wildcards")
    lint.add_argument("--config", metavar="FILE", help="pyproject.toml with [tool.slipstream-audit] hot = [...]")
    lint.add_argument("--all", action="store_true", help="treat every function as hot")
    lint.set_defaults(run=_lint)

    prove = commands.add_parser("prove", help="run a CUDA path under fake tensors, without a GPU")
    prove.add_argument("target", metavar="module:function")
    prove.add_argument("args", nargs="*", help="strings handed to the function")
    prove.add_argument("--frames", type=int, help="instead of the program's own number")
    prove.add_argument("--kernel", action="append", default=[], help="custom operation that must be reached")
    prove.set_defaults(run=_prove)

    for command in (run, lint, prove):
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.add_argument("--stacks", action="store_true", help="print whole Python stacks")
    return parser


def _show(options: argparse.Namespace, report: Report, extra: dict[str, Any] | None = None) -> None:
    if options.json:
        print(json.dumps({**report.to_dict(), **(extra or {})}, indent=2))
    else:
        print(report.table(options.stacks))


def _run(options: argparse.Namespace) -> int:
    script = Path(options.script)
    if not script.is_file():
        raise AuditError(f"{script} is not a file")
    import torch

    from slipstream.audit.runtime import watch
    from slipstream.audit.trace import profile

    blind = options.device == "cuda" and not torch.cuda.is_available()
    if blind:
        print(
            "slipstream audit: no CUDA device here, so no wait for it can be seen; "
            "use `slipstream audit prove`, or --device cpu to treat CPU tensors as the device's",
            file=sys.stderr,
        )
    report = Report(str(script))
    trace = profile(options.trace, frame=options.frame) if options.trace else contextlib.nullcontext()
    code = 0
    # With --json the report alone goes to stdout.
    quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with _as_main(script, options.args), quiet:
        with trace as profiled:
            watched = watch(device=options.device, only=options.only, name=str(script))
            try:
                with watched:
                    runpy.run_path(str(script), run_name="__main__")
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
                if not isinstance(stop.code, (int, type(None))):
                    print(stop.code, file=sys.stderr)  # as python itself does
            except Exception as error:
                # What was found until then is still worth reading.
                code = 1
                _print_error(error, script)
    report.merge(watched.report)
    summary = profiled.summary if profiled is not None else None
    if summary is not None and summary.frames:
        report.merge(summary.report())
    _show(options, report, {"trace": summary.to_dict()} if summary is not None else None)
    if summary is not None and not options.json:
        print(f"\ntrace: {options.trace}\n{summary.table()}")
    if code:
        print(f"slipstream audit: the script ended with exit code {code}", file=sys.stderr)
    if code or not report.ok:
        return 1
    if watched.unseen:
        names = ", ".join(sorted(watched.unseen))
        raise AuditError(f"nothing was looked at below --in {names}: no operation, wait or graph launch happened there")
    return 2 if blind else 0


def _print_error(error: Exception, script: Path) -> None:
    """The traceback from the script's own first line on, as if it had been started by python itself."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace or error.__traceback__))


@contextlib.contextmanager
def _as_main(script: Path, args: Sequence[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as if the script had been started by python itself."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _lint(options: argparse.Namespace) -> int:
    from slipstream.audit.lint import lint_paths, read_hot_table

    config = Path(options.config) if options.config else Path("pyproject.toml")
    if options.config and not config.is_file():
        raise AuditError(f"{config} is not a file")
    hot = [*options.hot, *(read_hot_table(config) if config.is_file() else [])]
    report = lint_paths(options.paths, hot=hot, every=options.all)
    _show(options, report)
    if not report.counters["hot_functions"]:
        raise AuditError("no hot function found: mark one with `# audit: hot`, or name it with --hot, or use --all")
    return report.exit_code


def _prove(options: argparse.Namespace) -> int:
    from slipstream.audit.proof import prove

    proof = prove(options.target, args=options.args, frames=options.frames, kernels=options.kernel)
    print(proof.to_json() if options.json else proof.table(options.stacks))
    return proof.exit_code


def _engine(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="slipstream audit", description=__doc__, add_help=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("--trace", metavar="FILE")
    options, rest = parser.parse_known_args(list(argv))
    if rest and rest[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if rest and not rest[0].startswith("-"):
        raise AuditError(f"unknown command {rest[0]!r}: expected one of {', '.join(_COMMANDS)}, or engine options")
    from slipstream.audit.proof import load_target

    try:
        target = load_target(_ENGINE_TARGET[0])
    except AuditError as error:
        raise AuditError(f"the engine's audit program is not there: {error}") from error
    result = target(list(rest), options.trace)
    if not isinstance(result, Report):
        return int(result)
    _show(options, result)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
