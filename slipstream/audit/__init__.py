"""Finds the places where a PyTorch program makes the host wait for the device, or the device for the host.

Independent of the rest of the package: it imports nothing else of it and works on any PyTorch program.

Four ways of looking, one set of rules (`slipstream.audit.rules.RULES`):

* `watch`    at run time: a context manager or decorator; each finding has the Python stack, a reason and a fix;
* `prove`    without a GPU: runs the CUDA path under fake CUDA tensors in a subprocess and reports every finding;
* `trace`    what the device did, per frame, from a torch.profiler trace;
* `lint`     the source forms of the same rules in named hot paths.

`allow_sync("reason")` marks a deliberate exception; each one is listed in the report.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.audit.events import AuditRule
    from slipstream.audit.lint import lint_paths, lint_source
    from slipstream.audit.proof import Program, prove
    from slipstream.audit.report import Allowed, AuditError, Finding, Report
    from slipstream.audit.rules import RULES
    from slipstream.audit.runtime import watch
    from slipstream.audit.scope import allow_sync, hot, mark_staging
    from slipstream.audit.trace import TraceSummary, load_trace, profile, summarize

# Imported on first use: the pytest plugin and the linter must not pay for `import torch`.
_HOME = {
    "AuditError": "report",
    "AuditRule": "events",
    "Allowed": "report",
    "Finding": "report",
    "Program": "proof",
    "RULES": "rules",
    "Report": "report",
    "TraceSummary": "trace",
    "allow_sync": "scope",
    "hot": "scope",
    "lint_paths": "lint",
    "lint_source": "lint",
    "load_trace": "trace",
    "mark_staging": "scope",
    "profile": "trace",
    "prove": "proof",
    "summarize": "trace",
    "watch": "runtime",
}

__all__ = [
    "RULES",
    "Allowed",
    "AuditError",
    "AuditRule",
    "Finding",
    "Program",
    "Report",
    "TraceSummary",
    "allow_sync",
    "hot",
    "lint_paths",
    "lint_source",
    "load_trace",
    "mark_staging",
    "profile",
    "prove",
    "summarize",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
