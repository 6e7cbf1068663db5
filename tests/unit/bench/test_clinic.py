"""bench/clinic without a GPU: the auditor names each `before` and is silent for each `after`; both do the same work."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.clinic import EngineCase, Pair, cases, engine_case, measure, render
from bench.clinic.__main__ import main
from bench.clinic.loop import Loop
from slipstream.audit import prove, watch
from slipstream.audit.proof import Proof
from slipstream.device import frame
from slipstream.device.logits import LogitStages
from slipstream.draft.ngram import NgramDrafter
from tests.support.tiny import write_tiny_checkpoint
from tests.unit.bench.clinic_programs import STEPS, provable

PAIRS = [case for case in cases() if isinstance(case, Pair)]
ENGINE = [case for case in cases() if isinstance(case, EngineCase)]
PROGRAM = "tests.unit.bench.clinic_programs:build"


@pytest.fixture(scope="module")
def before() -> Proof:
    return prove(PROGRAM, args=["before"])


@pytest.fixture(scope="module")
def after() -> Proof:
    return prove(PROGRAM, args=["after"])


def found_in(proof: Proof, form: Any) -> list[tuple[str, int]]:
    """(rule, count) of the findings inside a form."""
    lines, first = inspect.getsourcelines(form)
    here = range(first, first + len(lines))
    return [(f.rule, f.count) for f in proof.report.findings if f.site.file.endswith("forms.py") and f.line in here]


def test_the_registry_holds_the_forms_that_the_issue_names() -> None:
    assert len(PAIRS) >= 12 and len(ENGINE) >= 2
    rules = {case.rule for case in PAIRS}
    assert rules >= {
        "host-read", "tensor-literal", "pageable-copy", "strided-copy", "boolean-index", "nonzero",
        "repeat-interleave", "pin-memory", "tensor-from-scalars", "explicit-sync", "allocation-growth", "recompile",
    }  # fmt: skip
    assert ENGINE[0].name.startswith("founding case 1")
    for number in range(1, 5):
        assert any(case.name.startswith(f"founding case {number}") for case in cases()), number


@pytest.mark.parametrize("case", provable(), ids=lambda c: c.name)
def test_the_auditor_names_before_and_is_silent_for_after(case: Pair, before: Proof, after: Proof) -> None:
    assert not before.error and not after.error
    got = found_in(before, case.before)
    assert {rule for rule, _ in got} == {case.rule}
    assert all(count >= STEPS for _, count in got), "the form waits in every step"
    assert found_in(after, case.after) == []


def test_after_is_clean_everywhere(after: Proof) -> None:
    assert after.exit_code == 0, after.table()
    assert after.frames == STEPS * len(provable())


@pytest.mark.parametrize("case", PAIRS, ids=lambda c: c.name)
def test_both_forms_give_the_same_tokens_and_state(case: Pair) -> None:
    loop, results = Loop("cpu"), []
    for form in (case.before, case.after):
        loop.reset()
        outs = [form(loop, t) for t in range(6)]
        results.append([[o.clone() for o in (out if isinstance(out, tuple) else (out,))] for out in outs[-1:]])
    for a, b in zip(results[0][-1], results[1][-1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_growth_is_seen_where_memory_is_counted() -> None:
    case = next(c for c in PAIRS if c.rule == "allocation-growth")
    for form, count in ((case.before, 5), (case.after, 0)):
        loop = Loop("cpu")
        form(loop, 0)
        held = lambda loop=loop: 0 if loop.grown_LH is None else loop.grown_LH.nbytes
        with watch(device="cpu", memory=held) as report:
            for t in range(1, 6):
                form(loop, t)
        # The operation after the growth is what notices it: the last one has none behind it but the region's end.
        assert sum(f.count for f in report.by_rule("allocation-growth")) == count


def test_recompiles_are_seen_and_gone_in_after() -> None:
    import torch._dynamo

    case = next(c for c in PAIRS if c.rule == "recompile")
    loop = Loop("cpu")
    for form, at_least, at_most in ((case.before, 4, 4), (case.after, 0, 0)):
        torch._dynamo.reset()
        loop.reset()
        form(loop, 0)
        with watch(device="cuda") as report:
            for t in range(1, 7):
                form(loop, t)
        assert at_least <= sum(f.count for f in report.by_rule("recompile")) <= at_most


@pytest.mark.parametrize(
    ("number", "kind", "owner", "function"),
    [
        (1, "pictures", frame, "row_positions"),
        (2, "greedy", NgramDrafter, "draft_slots"),
        (4, "requests", LogitStages, "committed"),
    ],
)
def test_a_founding_case_turns_the_proof_red_and_puts_the_function_back(
    number: int, kind: str, owner: Any, function: str
) -> None:
    case = next(c for c in ENGINE if c.name.startswith(f"founding case {number}"))
    production = getattr(owner, function)
    with case.before():
        assert getattr(owner, function) is not production
    assert getattr(owner, function) is production
    plant = f"tests.unit.bench.test_clinic:put_back_{number}"
    proof = prove("slipstream.benchmark.frame_program:build", args=[kind, plant])
    assert proof.exit_code == 1
    assert {f.rule for f in proof.report.findings} == {case.rule}
    assert all(f.site.file.endswith("founding.py") for f in proof.report.findings)


def put_back_1() -> None:
    from bench.clinic.founding import positions_from_device_scalars

    scope = positions_from_device_scalars()
    scope.__enter__()
    _open.append(scope)


def put_back_2() -> None:
    """The founding case for the rest of a proof's process."""
    from bench.clinic.founding import scalar_per_draft_step

    scope = scalar_per_draft_step()
    scope.__enter__()
    _open.append(scope)


def put_back_4() -> None:
    from bench.clinic.founding import last_tokens_from_a_list

    scope = last_tokens_from_a_list()
    scope.__enter__()
    _open.append(scope)


_open: list[Any] = []


def test_the_measuring_code_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of it, with few steps; the figures mean nothing here."""
    for name in ("STEPS", "COLD_STEPS", "ENGINE_FRAMES"):
        monkeypatch.setattr(measure, name, 4)
    monkeypatch.setattr(measure, "REPEATS", 1)
    loop = Loop("cpu")
    result = measure.measure_pair(next(c for c in PAIRS if c.rule == "host-read"), loop)
    assert result["before"]["findings_per_step"] >= 1 > result["after"]["findings_per_step"]
    assert set(result["before"]) >= {"syncs_per_step", "host_us", "step_ms", "device_idle_share", "pause_kept"}
    model = write_tiny_checkpoint(tmp_path / "m", "llama", max_position_embeddings=2048)
    figures = measure.engine_figures(str(model), ENGINE[0].options | {"cuda_graphs": False}, batch=2, device="cpu")
    assert figures["step_ms"] > 0 and figures["host_us"] > 0


def test_drive_counts_the_host_inside_a_step_and_lets_pauses_through() -> None:
    import time

    step_s, host_s = measure.drive(lambda t: time.sleep(0.002), 10)
    assert 0.002 <= host_s <= step_s
    paused_s, host_paused_s = measure.drive(lambda t: None, 50, pause_s=0.05)
    assert paused_s >= 0.001 > host_paused_s


def result(tmp_path: Path) -> dict[str, Any]:
    side = {"device_idle_share": 0.25, "syncs_per_step": 3.0, "findings_per_step": 3.0, "host_us": 400.0,
            "step_ms": 6.5, "pause_kept": 0.9}  # fmt: skip
    good = {"device_idle_share": 0.01, "syncs_per_step": 0.0, "findings_per_step": 0.0, "host_us": 120.0,
            "step_ms": 4.1, "pause_kept": None}  # fmt: skip
    return {
        "date": "2026-11-30", "command": "python -m bench.clinic", "commit": "abc", "batch": 8,
        "hardware": {"gpu": "GPU", "cpus": 2}, "versions": {},
        "cases": [{"name": "one", "where": "bench/configs/llama-3.1-8b", "before": side, "after": good},
                  {"name": "two", "where": "loop", "before": side, "after": good}],
    }  # fmt: skip


def test_the_table_leads_with_idle_share_and_the_pause_test(tmp_path: Path) -> None:
    head, one, _ = render.table(result(tmp_path)).splitlines()
    assert head.split("  ")[0] == "case" and head.index("idle share") < head.index("kept in pauses")
    assert head.index("kept in pauses") < head.index("step ms")
    assert "25.0% → 1.0%" in one and "90.0% → -" in one and "6.500 → 4.100" in one


def test_the_readme_section_is_written_once_and_rewritten_in_place(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# X\n\n## How fast\n\ntext\n\n## What is built\n\nmore\n")
    render.update_readme(readme, result(tmp_path), "bench/results/x.json")
    once = readme.read_text()
    assert once.index("text") < once.index(render.BEGIN) < once.index("| one | 25.0% → 1.0% |")
    assert once.index(render.END) < once.index("## What is built")
    changed = result(tmp_path)
    changed["cases"] = changed["cases"][:1]
    render.update_readme(readme, changed, "bench/results/y.json")
    twice = readme.read_text()
    assert twice.count(render.BEGIN) == 1 and "| two |" not in twice and "y.json" in twice and "x.json" not in twice
    readme.write_text("# nothing\n")
    with pytest.raises(ValueError, match="neither"):
        render.update_readme(readme, changed, "z.json")


def test_the_command_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("founding case 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2 and "CUDA" in capsys.readouterr().err
    assert main(["--only", "nothing"]) == 2 and "'nothing'" in capsys.readouterr().err


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="there already"):
        engine_case(ENGINE[0].name, rule="x", about="")(ENGINE[0].before)


def test_a_result_can_be_written_as_json(tmp_path: Path) -> None:
    assert json.loads(json.dumps(result(tmp_path)))["cases"][0]["name"] == "one"
