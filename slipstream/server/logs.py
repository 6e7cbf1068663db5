"""The server's log on stderr: one JSON object per line, or plain text at a terminal.

No prompt, answer or key is ever logged. Each line of JSON has time (UTC), level and event; those that belong to a
request have its request_id, those of its end also method, path, status, seconds, tokens and finish reasons.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMATS = ("auto", "text", "json")
_log = logging.getLogger("slipstream.server")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        mark = "error: " if record.levelno >= logging.ERROR else ""
        fields = getattr(record, "fields", {})
        blocks = [v for v in fields.values() if isinstance(v, str) and "\n" in v]
        words = [f"{k}={v}" for k, v in fields.items() if v is not None and v not in blocks]
        if record.exc_info:
            blocks.append(self.formatException(record.exc_info))
        return "\n".join([" ".join([f"slipstream: {mark}{record.getMessage()}", *words]), *blocks])


def set_up(kind: str) -> str:
    """Log to stderr as `kind`, one of FORMATS; the format that auto chose. uvicorn's own lines go the same way."""
    if kind == "auto":
        kind = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    for name, level in (("slipstream.server", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    return kind


def info(event: str, **fields: Any) -> None:
    _log.info(event, extra={"fields": fields})


def warning(event: str, **fields: Any) -> None:
    _log.warning(event, extra={"fields": fields})


def error(event: str, *, trace: bool = False, **fields: Any) -> None:
    """trace: with the traceback of the exception that is being handled."""
    _log.error(event, exc_info=trace, extra={"fields": fields})
