"""bench/host_frame.py drives the real scheduler, rings and collector: it must follow their changes."""

from __future__ import annotations

import json
import sys

import pytest

from bench import host_frame


@pytest.mark.parametrize(("drafts", "adaptive"), [(0, False), (3, False), (3, True)])
def test_it_measures(
    drafts: int, adaptive: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["host_frame.py", "--batch", "2", "--drafts", str(drafts), "--frames", "40"]
    words += ["--adaptive"] * adaptive
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(host_frame.torch, "set_num_threads", lambda n: None)  # other tests of this process want theirs
    host_frame.main()
    [line] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["batch"] == 2 and line["adaptive"] is adaptive and line["plan"] > 0 and line["collect"] > 0
    assert line["host_us"] == pytest.approx(sum(line[k] for k in ("plan", "launch", "read", "collect")), rel=0.5)
