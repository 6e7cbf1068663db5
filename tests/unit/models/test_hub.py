"""Hub ids: a hand-made cache, and a loopback server in place of the hub. Each case runs in its own process, since
`huggingface_hub` reads its environment when it is imported."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slipstream.models.hub import is_hub_id
from tests.support.tiny import write_tiny_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import json, sys
from slipstream.errors import ModelLoadError
from slipstream.models import load_model
out = []
for name, revision in json.loads(sys.argv[1]):
    try:
        out.append("ok " + load_model(name, revision=revision).source.name)
    except ModelLoadError as e:
        out.append(str(e))
print(json.dumps(out))
"""


def outcomes(home: Path, cases: list[tuple[str, str | None]], **env: str) -> list[str]:
    """What load_model says for each (id, revision), in a process with its own cache folder."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    clean |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **env}
    repo = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases)],
        env=clean, cwd=repo, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    assert all("\n" not in a for a in answers)
    return answers


def cached(home: Path, repo: str) -> None:
    """A repository in the cache's own layout: blobs left out, files lie in the snapshot."""
    folder = home / "hub" / ("models--" + repo.replace("/", "--"))
    write_tiny_checkpoint(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "refs" / "v1").write_text(COMMIT)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a snapshot needs. Repositories: org/open, org/gated (with a token), nothing else."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        repo = next((r for r in ("org/open", "org/gated") if r in path), None)
        if repo is None:
            return self.refuse(404, "RepoNotFound", "Repository not found")
        if repo == "org/gated" and self.headers.get("Authorization") != "Bearer secret":
            return self.refuse(403, "GatedRepo", "Access to this repository is restricted")
        if "nosuch" in path:
            return self.refuse(404, "RevisionNotFound", "Revision not found")
        if "/resolve/" in path:
            name = path.split(f"/resolve/{COMMIT}/")[-1]
            if name not in self.files:
                return self.refuse(404, "EntryNotFound", "Entry not found")
            return self.reply(self.files[name], {"ETag": f'"{hashlib.sha1(self.files[name]).hexdigest()}"'})
        if "/tree/" in path:
            return self.reply(json.dumps([self.entry(n) for n in self.files]).encode(), {})
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "downloads": 0}
        info["siblings"] = [{"rfilename": n, "size": len(b)} for n, b in self.files.items()]
        self.reply(json.dumps(info).encode(), {})

    def entry(self, name: str) -> dict[str, Any]:
        raw = self.files[name]
        return {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}

    def refuse(self, status: int, code: str, message: str) -> None:
        self.reply(b"{}", {"X-Error-Code": code, "X-Error-Message": message}, status)

    def reply(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    folder = write_tiny_checkpoint(tmp_path / "served", shards=2)
    Hub.files = {p.name: p.read_bytes() for p in folder.iterdir()}
    Hub.files |= {"README.md": b"# words", "pytorch_model.bin": b"pickle", "onnx/model.json": b"{}"}
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_may_be_an_id() -> None:
    assert is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert is_hub_id("gpt2")
    for name in ("a/b/c", "/a/b", "./a", "a/b.gguf", "../b", "a b", ""):
        assert not is_hub_id(name)


def test_cache_offline(tmp_path: Path) -> None:
    cached(tmp_path, "org/open")
    cases: list[tuple[str, str | None]] = [
        ("org/open", None), ("org/open", "v1"), ("org/open", COMMIT), ("org/open", "v2"), ("org/other", None),
    ]  # fmt: skip
    got = outcomes(tmp_path, cases, HF_HUB_OFFLINE="1")
    assert got[:3] == [f"ok {COMMIT}"] * 3
    assert "org/open at revision 'v2' is not in the hub cache" in got[3]
    assert "HF_HUB_OFFLINE" in got[4]


def test_hub_out_of_reach(tmp_path: Path) -> None:
    cached(tmp_path, "org/open")
    # Port 9 of the loopback device: nobody answers there.
    got = outcomes(tmp_path, [("org/open", None), ("org/other", None)], HF_ENDPOINT="http://127.0.0.1:9")
    assert got[0] == f"ok {COMMIT}"
    assert "org/other is not in the hub cache, and the hub is out of reach" in got[1]


def test_fetch(tmp_path: Path, endpoint: str) -> None:
    cases: list[tuple[str, str | None]] = [
        ("org/open", None), ("org/open", "nosuch"), ("org/absent", None), ("org/gated", None),
    ]  # fmt: skip
    got = outcomes(tmp_path, cases, HF_ENDPOINT=endpoint)
    assert got[0] == f"ok {COMMIT}"
    assert "org/open has no revision 'nosuch'" in got[1]
    assert "org/absent is neither a path here nor a repository" in got[2]
    assert "org/gated is gated" in got[3]
    fetched = {p.rsplit("/", 1)[-1] for p in Hub.asked if "/resolve/" in p}
    assert "config.json" in fetched
    assert fetched.isdisjoint({"README.md", "pytorch_model.bin", "model.json"})
    assert outcomes(tmp_path, [("org/open", None)], HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1") == got[:1]


def test_token_opens_a_gated_repository(tmp_path: Path, endpoint: str) -> None:
    assert outcomes(tmp_path, [("org/gated", None)], HF_ENDPOINT=endpoint, HF_TOKEN="secret") == [f"ok {COMMIT}"]


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.errors import ModelLoadError
    from slipstream.models.hub import fetch

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match=r"slipstream\[hub\]"):
        fetch("org/open")
