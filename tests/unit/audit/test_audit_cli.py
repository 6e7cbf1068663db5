"""The command line and the pytest plugin."""

import json
import subprocess
import sys
import types

import pytest
import torch

from slipstream.audit import Report
from slipstream.audit.cli import main, register_engine_target

SCRIPT = """
import sys
import torch

def step(x):
    return x.sum().item()

def main():
    x = torch.ones(3)
    x.tolist()
    print("the script's own output")
    for _ in range(2):
        with torch.profiler.record_function("frame"):
            step(x)
    assert sys.argv[1:] == ["--flag", "7"] and __name__ == "__main__", sys.argv

main()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_run_prints_a_table_and_returns_1(script, capsys):
    assert main(["run", "--device", "cpu", "--in", "step", str(script), "--flag", "7"]) == 1
    out = capsys.readouterr().out
    assert "1 finding(s)" in out and "script.py:6 in step" in out and "fix: " in out


def test_run_json_and_trace(script, capsys, tmp_path):
    trace = tmp_path / "trace.json"
    options = ["--device", "cpu", "--json", "--trace", str(trace)]
    assert main(["run", *options, str(script), "--flag", "7"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [(f["rule"], f["count"]) for f in data["findings"]] == [("host-copy", 1), ("host-read", 2)]
    assert len(data["trace"]["frames"]) == 2 and trace.exists()


def test_run_of_a_clean_script_is_0(tmp_path, capsys):
    path = tmp_path / "clean.py"
    path.write_text("import torch\ntorch.ones(3).sum()\n")
    before = list(sys.path), sys.argv
    assert main(["run", "--device", "cpu", str(path)]) == 0
    assert "no findings" in capsys.readouterr().out and (sys.path, sys.argv) == before


STEPS = """
import torch

class Engine:
    def step(self):
        return torch.ones(3).sum()

    def replay(self):
        torch.cuda.CUDAGraph.replay(None)

Engine().step()
Engine().replay()
"""


@pytest.mark.parametrize("names", [["step"], ["Engine.step", "replay"], ["stpe"], ["step", "stpe"]])
def test_a_function_that_never_ran_is_not_clean(names, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)
    path = tmp_path / "steps.py"
    path.write_text(STEPS)
    code = main(["run", "--device", "cpu", *(word for name in names for word in ("--in", name)), str(path)])
    said = "nothing was looked at below --in stpe" in capsys.readouterr().err
    assert (code, said) == ((2, True) if "stpe" in names else (0, False))


def test_without_the_device_nothing_is_clean(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "steps.py"
    path.write_text("import torch\ntorch.ones(3).sum().item()\n")
    assert main(["run", str(path)]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_script_that_fails_is_not_clean(tmp_path, capsys):
    path = tmp_path / "fails.py"
    path.write_text("import sys\nsys.exit(3)\n")
    assert main(["run", "--device", "cpu", str(path)]) == 1
    assert "exit code 3" in capsys.readouterr().err


def test_message_of_sys_exit_is_printed(tmp_path, capsys):
    path = tmp_path / "says.py"
    path.write_text("import sys\nsys.exit('no such model')\n")
    assert main(["run", "--device", "cpu", str(path)]) == 1
    assert "no such model\n" in capsys.readouterr().err


def test_exception_of_the_script_keeps_the_report(tmp_path, capsys):
    path = tmp_path / "raises.py"
    path.write_text("import torch\ntorch.ones(2).sum().item()\nraise KeyError('mine')\n")
    assert main(["run", "--device", "cpu", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "raises.py:2" in out and "host-read" in out
    assert "KeyError: 'mine'" in err and "runpy" not in err and "cli.py" not in err


def test_code_of_a_package_names_the_caller(tmp_path, capsys, monkeypatch):
    package = tmp_path / "lib" / "site-packages" / "their_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def f(x):\n    return x.sum().item()\n")
    monkeypatch.syspath_prepend(str(package.parent))
    path = tmp_path / "uses.py"
    path.write_text("import torch\nfrom their_library import f\nf(torch.ones(2))\n")
    assert main(["run", "--device", "cpu", str(path)]) == 1
    out = capsys.readouterr().out
    assert " their_library/__init__.py:2 in f" in out and "uses.py:3" in out


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["run", "absent.py"], "is not a file"),
        (["lint", "absent.py"], "does not exist"),
        (["prove", "noname"], "module:function"),
        (["frobnicate"], "unknown command 'frobnicate'"),
        (["run"], "required"),
        (["lint", "--config", "absent.toml", "x"], "is not a file"),
    ],
)
def test_wrong_usage_is_2(argv, word, capsys):
    assert main(argv) == 2
    assert word in capsys.readouterr().err


def test_lint_exit_codes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "loop.py"
    path.write_text("def step(x):\n    return x.item()\n")
    assert main(["lint", str(path)]) == 2
    assert "no hot function" in capsys.readouterr().err
    assert main(["lint", "--hot", "step", str(path)]) == 1
    (tmp_path / "pyproject.toml").write_text('[tool.slipstream-audit]\nhot = ["loop.py::step"]\n')
    capsys.readouterr()
    assert main(["lint", "--json", str(path)]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["rule"] == "host-read"
    path.write_text("def step(x):\n    return x + 1\n")
    assert main(["lint", str(path)]) == 0


def test_prove(capsys):
    assert main(["prove", "proof_programs:clean", "--json", "--frames", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == {"planted::twice": 1}


def test_engine_target(monkeypatch, capsys):
    calls = []

    def audit_engine(args, trace):
        calls.append((args, trace))
        return Report("engine")

    module = types.ModuleType("engine_target_for_test")
    module.main = audit_engine
    module.code = lambda args, trace: 5
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("slipstream.audit.cli._ENGINE_TARGET", ["absent_engine:main"])
    assert main(["--model", "m"]) == 2
    assert "absent_engine" in capsys.readouterr().err
    register_engine_target("engine_target_for_test:main")
    assert main(["--model", "m", "--draft", "d", "--json", "--trace", "t.json"]) == 0
    assert calls == [(["--model", "m", "--draft", "d"], "t.json")]
    assert json.loads(capsys.readouterr().out)["ok"] is True
    register_engine_target("engine_target_for_test:code")
    assert main([]) == 5


PLUGIN_TEST = """
import pytest
import torch

@pytest.fixture
def x():
    t = torch.ones(3)
    t.sum().item()  # a fixture may wait
    return t

@pytest.mark.no_sync(device="cpu")
def test_clean(x):
    x + 1

@pytest.mark.no_sync(device="cpu")
def test_waits(x):
    x.sum().item()

def test_unmarked(x):
    x.sum().item()

@pytest.mark.no_sync(device="cpu")
def test_fails_by_itself(x):
    assert x.shape == (4,)
"""


def test_pytest_plugin(tmp_path):
    (tmp_path / "test_plugin_case.py").write_text(PLUGIN_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "slipstream.audit.pytest_plugin", "--strict-markers"]
    # An installed package brings the plugin by its entry point; loaded by name it must not come twice.
    env = {**_env(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, env=env, check=False)
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "test_waits: 1 finding(s)" in done.stdout and "x.sum().item()" in done.stdout
    assert "AssertionError" in done.stdout or "assert torch.Size" in done.stdout


def _env():
    import os
    from pathlib import Path

    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}


def test_the_linter_does_not_import_torch(tmp_path):
    code = "import sys, slipstream.audit as a; a.lint_source('x = 1'); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
