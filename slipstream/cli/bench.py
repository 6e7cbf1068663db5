"""`slipstream bench decode|accept`; their options and their work are the benchmark room's."""

from __future__ import annotations

from slipstream.cli import not_built
from slipstream.cli.options import Parser
from slipstream.errors import ConfigError

LATER = ("serve",)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: slipstream bench decode|accept [options]\n\n"
            "  decode    time per token at several batch sizes\n"
            "  accept    tokens per round and speed-up of a draft on prompts from a file"
        )
        return 0 if argv else 2
    name = argv[0]
    if name in LATER:
        raise not_built(f"bench {name}")
    if name == "accept":
        from slipstream.benchmark import accept

        parser = Parser(prog="slipstream bench accept", description="Acceptance length of a draft on real prompts.")
        accept.add_arguments(parser)
        return int(accept.run(parser.parse_args(argv[1:])) or 0)
    if name != "decode":
        raise ConfigError(f"unknown benchmark {name!r}; built are: bench decode, bench accept")
    from slipstream.benchmark import decode

    parser = Parser(prog="slipstream bench decode", description="Time per decoded token beside its floor.")
    decode.add_arguments(parser)
    return int(decode.run(parser.parse_args(argv[1:])) or 0)
