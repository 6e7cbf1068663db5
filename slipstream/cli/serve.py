"""`slipstream serve`: the options of the server. Its code is imported when they are known to be right."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from slipstream.cli.options import Parser, add_engine_options, engine_options, utf8
from slipstream.errors import ConfigError, UnsupportedError

DESCRIPTION = """\
Serves a model over HTTP, as OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models; and /health, /metrics,
/version, /tokenize, /detokenize, /server_info. SIGTERM finishes what runs, then ends."""

KEY_VARIABLE = "SLIPSTREAM_API_KEY"
NEEDS = ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def parser() -> Parser:
    p = Parser(prog="slipstream serve", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
    group = p.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, metavar="P", help="default 8000; 0: the system chooses")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"clients must send it, except to /health; repeatable. ${KEY_VARIABLE} is one more, and not seen by ps",
    )  # fmt: skip
    group.add_argument("--served-model-name", metavar="NAME", help="name of the model for clients")
    group.add_argument("--max-slots", type=int, metavar="N", help="answers that run at once")
    group.add_argument(
        "--max-queue", type=int, default=256, metavar="N", help="answers that may wait; then 429 (default 256)"
    )
    group.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S", help="how long SIGTERM waits for answers"
    )
    group.add_argument(
        "--watchdog-seconds", type=float, default=60.0, metavar="S", help="/health says 503 without progress for this"
    )
    group.add_argument(
        "--admin-port", type=int, metavar="P", help="move /metrics, /server_info and the page to this port of 127.0.0.1"
    )
    group.add_argument(
        "--log-format", choices=("auto", "text", "json"), default="auto",
        help="of the log on stderr (auto: text at a terminal, else a JSON object per line)",
    )  # fmt: skip
    group.add_argument(
        "--tool-call-parser", metavar="NAME",
        help="how the model writes tool calls: hermes, llama3_json or mistral (default: by its chat template)",
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", metavar="NAME", help="split reasoning from the answer: qwen3 or deepseek_r1"
    )
    add_engine_options(p)
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.served is not None:
        if args.model is not None:
            raise ConfigError(f"MODEL {args.served!r} and --model {args.model!r} are both given; leave one out")
        args.model = args.served
    options = engine_options(args)
    if args.max_slots is not None:
        options["max_slots"] = args.max_slots
    keys = [*args.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    _check(args, keys)
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"slipstream serve needs {', '.join(missing)}; install the extra: pip install 'slipstream[server]'"
        )
    if args.host not in LOOPBACK and not keys:
        print(f"slipstream: anybody who reaches {args.host} may use this server: no --api-key", file=sys.stderr)

    from slipstream.server.formats import Formats
    from slipstream.server.serve import ServeConfig, serve

    return serve(
        ServeConfig(
            host=args.host, port=args.port, name=args.served_model_name or _name(args.model), api_keys=tuple(keys),
            max_queue=args.max_queue, drain_seconds=args.drain_seconds, watchdog_seconds=args.watchdog_seconds,
            admin_port=args.admin_port, log_format=args.log_format,
            formats=Formats(tools=args.tool_call_parser, reasoning=args.reasoning_parser),
        ),
        options,
    )  # fmt: skip


def _check(args: argparse.Namespace, keys: list[str]) -> None:
    for option, port in (("--port", args.port), ("--admin-port", args.admin_port)):
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"{option} {port} must be from 0 to 65535")
    if args.admin_port and args.admin_port == args.port:
        raise ConfigError(f"--admin-port {args.port} is --port too; give it another one")
    if not 0 <= args.max_queue <= 100_000:
        raise ConfigError(f"--max-queue {args.max_queue} must be from 0 to 100000")
    for name in ("drain_seconds", "watchdog_seconds"):
        if not 0 < getattr(args, name) <= 86400:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0 and at most 86400")
    for key in keys:
        if not utf8(key, "--api-key").strip():
            raise ConfigError("--api-key is empty")


def _name(model: str | None) -> str:
    """What clients call it: a hub id as it is, a file or folder by its own name."""
    if model is None:
        return "SmolLM2-135M-Instruct"
    path = Path(model).expanduser()
    return (path.resolve().name.removesuffix(".gguf") or model) if path.exists() else model
