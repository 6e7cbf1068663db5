"""What an audit found: findings, deliberate exceptions, and a table a person can read."""

from __future__ import annotations

import json
import linecache
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["wait", "cost", "note"]
"""`wait`: the host blocks. `cost`: work that does not belong in a hot loop. `note`: listed, never a failure."""

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MAX_STACK = 16
_PACKAGES = "/site-packages/"


class AuditError(Exception):
    """A wait was found where none is allowed, or the auditor was used wrongly."""


@dataclass(frozen=True)
class Site:
    """One frame of a Python stack. `line` counts from 1; `code` is the source text, "" if it is not at hand."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{_short_path(self.file)}:{self.line}"

    @property
    def installed(self) -> bool:
        """Whether it lies in an installed package: somebody else's code."""
        return _PACKAGES in self.file.replace(os.sep, "/")


@dataclass
class Finding:
    """One rule broken at one place. `count` is how often; `stack` the first time, innermost user frame first."""

    rule: str
    severity: Severity
    detail: str
    explain: str
    fix: str
    stack: list[Site] = field(default_factory=list)
    count: int = 1

    @property
    def site(self) -> Site:
        return self.stack[0] if self.stack else Site("<unknown>", 0, "")

    @property
    def line(self) -> int:
        return self.site.line


@dataclass
class Allowed:
    """A deliberate exception: where the scope stands, why, and how often each rule was broken inside it."""

    reason: str
    file: str
    line: int
    hits: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """The result of one audit.

    `findings` are failures, `notes` are facts that do not fail by themselves (event queries, stream waits),
    `allowed` are the deliberate exceptions, `counters` are numbers of the whole region.
    """

    name: str = "audit"
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    allowed: list[Allowed] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def add(self, finding: Finding) -> Finding:
        """Add one, or count it on an earlier finding of the same rule at the same place."""
        shelf = self.notes if finding.severity == "note" else self.findings
        for old in shelf:
            if (old.rule, old.site.file, old.line) == (finding.rule, finding.site.file, finding.line):
                old.count += finding.count
                return old
        shelf.append(finding)
        return finding

    def allow(self, reason: str, site: Site, rule: str | None = None, count: int = 1) -> None:
        """List the scope of an exception and, with `rule`, count hits inside it."""
        for entry in self.allowed:
            if (entry.reason, entry.file, entry.line) == (reason, site.file, site.line):
                break
        else:
            entry = Allowed(reason, site.file, site.line)
            self.allowed.append(entry)
        if rule is not None:
            entry.hits[rule] = entry.hits.get(rule, 0) + count

    def merge(self, other: Report) -> None:
        """Take over everything that `other` found."""
        for finding in [*other.findings, *other.notes]:
            self.add(finding)
        for allowed in other.allowed:
            site = Site(allowed.file, allowed.line, "")
            self.allow(allowed.reason, site)
            for rule, count in allowed.hits.items():
                self.allow(allowed.reason, site, rule, count)
        for key, value in other.counters.items():
            self.counters[key] = self.counters.get(key, 0) + value

    def by_rule(self, rule: str) -> list[Finding]:
        return [f for f in [*self.findings, *self.notes] if f.rule == rule]

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["ok"] = self.ok
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The inverse of `to_dict`."""

        def findings(key: str) -> list[Finding]:
            return [Finding(**{**f, "stack": [Site(**s) for s in f["stack"]]}) for f in data[key]]

        allowed = [Allowed(**a) for a in data["allowed"]]
        return cls(data["name"], findings("findings"), findings("notes"), allowed, dict(data["counters"]))

    def table(self, stacks: bool = False) -> str:
        """A plain-text table: findings first, then what was allowed and what is only noted."""
        return "\n".join(self._lines(stacks))

    def _lines(self, stacks: bool) -> Iterator[str]:
        if self.findings:
            yield f"{self.name}: {len(self.findings)} finding(s)"
            yield f"{'times':>6}  {'severity':8}  {'rule':20}  where"
            told: set[str] = set()
            for f in self.findings:
                yield from _entry(f, stacks, told)
        else:
            yield f"{self.name}: no findings"
        if self.allowed:
            yield "allowed on purpose:"
            for a in self.allowed:
                hits = ", ".join(f"{k}×{v}" for k, v in sorted(a.hits.items())) or "nothing happened inside"
                yield f"        {Site(a.file, a.line, '')}  {a.reason!r}: {hits}"
        if self.notes:
            yield "noted:"
            for f in self.notes:
                yield f"{f.count:>6}  {f.rule:20}  {f.site}  {f.detail}"
        if self.counters:
            yield "counters: " + ", ".join(f"{k} {v:g}" for k, v in sorted(self.counters.items()))


def _entry(f: Finding, stacks: bool, told: set[str]) -> Iterator[str]:
    """The lines of one finding. Reason and fix are printed once per rule: `told` holds those already printed."""
    yield f"{f.count:>6}  {f.severity:8}  {f.rule:20}  {f.site} in {f.site.function or '?'}"
    indent = " " * 18
    if f.site.code:
        yield f"{indent}> {f.site.code}"
    own = next((site for site in f.stack if not site.installed), None)
    if f.site.installed and own is not None and not stacks:
        yield f"{indent}called from {own} in {own.function}"
    for label, text in (("what", f.detail), ("why", f.explain), ("fix", f.fix)):
        if text and (label == "what" or f.rule not in told):
            yield textwrap.fill(f"{label}: {text}", 108, initial_indent=indent, subsequent_indent=indent + "  ")
    told.add(f.rule)
    if stacks:
        for s in f.stack[1:]:
            yield f"{indent}  called from {s} in {s.function}"


def user_stack(skip: int = 1) -> list[Site]:
    """The caller's Python stack, innermost first, without the frames of torch and of the auditor itself.

    `skip` frames next to this call are left out. Falls back to the bare innermost frame if nothing is left.
    """
    frame = sys._getframe(skip)
    sites: list[Site] = []
    outer = frame
    while frame is not None and len(sites) < _MAX_STACK:
        code = frame.f_code
        if not _is_internal(code.co_filename):
            line = frame.f_lineno or code.co_firstlineno
            text = linecache.getline(code.co_filename, line).strip()
            sites.append(Site(code.co_filename, line, code.co_qualname, text))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return sites or [Site(outer.f_code.co_filename, outer.f_lineno or 0, outer.f_code.co_qualname)]


def _is_internal(filename: str) -> bool:
    if filename.startswith((_HERE, "<frozen")):
        return True
    torch = sys.modules.get("torch")
    root = os.path.dirname(torch.__file__) + os.sep if torch is not None and torch.__file__ else None
    if root is not None and filename.startswith(root):
        return True
    return os.path.basename(filename) in ("contextlib.py", "functools.py", "runpy.py") and "lib" in filename


def _short_path(file: str) -> str:
    """Relative to the package folder for installed code, and to the working directory below it."""
    file = file.replace(os.sep, "/")
    if _PACKAGES in file:
        return file.rsplit(_PACKAGES, 1)[1]
    return os.path.relpath(file) if _below_cwd(file) else file


def _below_cwd(file: str) -> bool:
    try:
        return os.path.abspath(file).startswith(os.getcwd() + os.sep)
    except OSError:  # the working directory is gone
        return False
