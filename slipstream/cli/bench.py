"""`slipstream bench decode|accept|serve`; their options and their work are the benchmark room's."""

from __future__ import annotations

from importlib import import_module

from slipstream.cli.options import Parser
from slipstream.errors import ConfigError

KINDS = {
    "decode": ("time per token at several batch sizes", "Time per decoded token beside its floor."),
    "accept": ("tokens per round and speed-up of a draft on prompts from a file", "Acceptance length on real prompts."),
    "serve": ("latency and throughput of a running server under load", "Load for a server that speaks OpenAI's API."),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"usage: slipstream bench {'|'.join(KINDS)} [options]", ""]
        print("\n".join(lines + [f"  {name:<10}{about}" for name, (about, _) in KINDS.items()]))
        return 0 if argv else 2
    name = argv[0]
    if name not in KINDS:
        raise ConfigError(f"unknown benchmark {name!r}; built are: {', '.join(f'bench {kind}' for kind in KINDS)}")
    home = import_module(f"slipstream.benchmark.{name}")
    parser = Parser(prog=f"slipstream bench {name}", description=KINDS[name][1])
    home.add_arguments(parser)
    return int(home.run(parser.parse_args(argv[1:])) or 0)
