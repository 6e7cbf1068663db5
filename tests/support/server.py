"""A server as its own processes, on a port that the system chooses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.kit import perturb, tiny_model_dir

REPO = Path(__file__).resolve().parents[2]
ENGINE = ("--dtype", "float64", "--device", "cpu")
TEMPLATE = (
    "{% for m in messages %}{{ 'w90 ' if m.role == 'user' else 'w91 ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w91{% endif %}"
)


def served_models(root: Path) -> dict[str, str]:
    """A tiny target with a chat template, and a draft that is often right about it."""
    target = tiny_model_dir(root / "target", seed=1)
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return {"target": str(target), "draft": str(perturb(target, root / "draft", scale=0.02))}


class RunningServer:
    """`slipstream serve ...`; use it as a context manager. url: its address; log: lines of its stderr so far.

    http: a client of it; admin: one of its admin port, where it has one.
    """

    def __init__(self, *words: str, key: str | None = None) -> None:
        command = [sys.executable, "-m", "slipstream", "serve", *words, "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("SLIPSTREAM_API_KEY", None)
        if key is not None:
            environment["SLIPSTREAM_API_KEY"] = key
        self.process = subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(120)
        found = re.search(r"serving .* at (http://[^\s\"]+)", "".join(self.log))
        if found is None:
            self.close()
            raise AssertionError(f"the server did not start: {''.join(self.log)}")
        self.url = found[1]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = self.admin = self._client(self.url, headers)
        if (admin := re.search(r"page at (http://[^\s\"]+)", "".join(self.log))) is not None:
            self.admin = self._client(admin[1], headers)

    @staticmethod
    def _client(url: str, headers: dict[str, str]) -> httpx.Client:
        return httpx.Client(base_url=url, headers=headers, timeout=60, limits=httpx.Limits(max_connections=64))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "serving " in line:
                self._ready.set()
        self._ready.set()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def info(self) -> dict[str, Any]:
        return self.admin.get("/server_info").json()

    def idle(self) -> dict[str, Any]:
        """Wait for the end of all work, assert that free + cached = total in every pool; the engine's state."""
        state = until(lambda: (state := self.info()["engine"])["idle"] and state)
        pools = state["pools"]
        assert "leak" not in state, state["leak"]
        assert pools["slots_free"] == pools["slots"]
        assert pools["pages_free"] + pools["pages_cached"] == pools["pages"]
        return state

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(20)
        assert self.process.stderr is not None
        self.process.stderr.close()
        if hasattr(self, "http"):
            self.http.close()
            self.admin.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.02)
    return value
