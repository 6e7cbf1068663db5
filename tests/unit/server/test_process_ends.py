"""What the server's sockets and the engine's process do at their ends."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

pytest.importorskip("uvicorn", reason="the server's extra is not installed")
pytest.importorskip("zmq", reason="the server's extra is not installed")

from slipstream.server.serve import _bind

WATCHED = """
import threading, sys
from slipstream.server.engine_process import _end_with_parent
sys.stdin.buffer.readline()
threading.Thread(target=_end_with_parent, daemon=True).start()
"""


def test_a_connection_sends_each_part_at_once() -> None:
    """Nagle's algorithm would hold the first token until the client's delayed acknowledgement of the header."""
    seen = list[int]()

    async def run() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = _bind("127.0.0.1", "--port", 0)
        async with await asyncio.start_server(answer, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()

    asyncio.run(run())
    assert seen and seen[0]


def test_the_engine_process_can_end_before_its_parent() -> None:
    """The thread that waits for the parent's end must not hold what the interpreter needs to end."""
    with subprocess.Popen([sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stderr is not None
        child.stdin.write(b"{}\n")
        child.stdin.flush()
        error = child.stderr.read()
        assert child.wait(60) == 0, error.decode()
