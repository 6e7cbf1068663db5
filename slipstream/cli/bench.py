"""`slipstream bench decode`; its options and its work are the benchmark room's."""

from __future__ import annotations

from slipstream.cli import not_built
from slipstream.cli.options import Parser
from slipstream.errors import ConfigError

LATER = ("accept", "serve")


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: slipstream bench decode [options]\n\n  decode    time per token at several batch sizes")
        return 0 if argv else 2
    name = argv[0]
    if name in LATER:
        raise not_built(f"bench {name}")
    if name != "decode":
        raise ConfigError(f"unknown benchmark {name!r}; built is: bench decode")
    from slipstream.benchmark import decode

    parser = Parser(prog="slipstream bench decode", description="Time per decoded token beside its floor.")
    decode.add_arguments(parser)
    return int(decode.run(parser.parse_args(argv[1:])) or 0)
