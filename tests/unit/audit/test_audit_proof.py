"""The proof without a GPU: fake CUDA tensors in a subprocess."""

import json

import planted_forms
import pytest
from planted import check_clean, check_planted

from slipstream.audit import AuditError, prove

PROVABLE = [n for n in planted_forms.PLANTS if n not in planted_forms.NO_GUARD]


# In inference mode the dispatcher shows composite operations whole; the rules must not depend on that.
@pytest.fixture(scope="module", params=["normal", "inference"])
def bad(request):
    return prove("planted_forms:build", args=["bad", request.param])


@pytest.fixture(scope="module", params=["normal", "inference"])
def good(request):
    return prove("planted_forms:build", args=["good", request.param])


def test_there_are_enough_plants():
    assert len(PROVABLE) >= 40
    twins = {n.replace("bad_", "good_") for n in planted_forms.PLANTS if n not in planted_forms.NOTES}
    assert twins == set(planted_forms.CLEAN)


@pytest.mark.parametrize("name", PROVABLE)
def test_plant_is_found(name, bad):
    assert not bad.error
    check_planted(name, bad.report)


@pytest.mark.parametrize("name", [n for n in planted_forms.CLEAN if n not in planted_forms.NO_GUARD])
def test_clean_twin_raises_no_alarm(name, good):
    assert not good.error
    check_clean(name, good.report)


def test_exit_codes_and_json(bad, good):
    assert bad.exit_code == 1 and not bad.ok
    assert good.exit_code == 0 and good.ok
    data = json.loads(good.to_json())
    assert data["frames"] == len(planted_forms.CLEAN) - 1
    assert data["ops"] > 50
    assert data["kernels"]["planted::twice"] == 2
    assert data["missing"] == [] and data["exit_code"] == 0
    assert "planted::twice" in good.table()


def test_all_findings_of_a_frame_are_reported_not_only_the_first():
    proof = prove("proof_programs:many")
    assert [f.rule for f in proof.report.findings] == ["host-read", "boolean-index", "tensor-literal", "explicit-sync"]
    assert all(f.count == 2 for f in proof.report.findings)  # once per frame


def test_values_read_are_stand_ins_and_loops_on_them_end():
    proof = prove("proof_programs:loops")
    assert proof.frames == 1 and proof.exit_code == 1
    assert {f.rule for f in proof.report.findings} == {"host-read", "host-copy"}


def test_kernel_that_is_not_reached_is_exit_2():
    proof = prove("proof_programs:clean", kernels=["planted::twice", "planted::count"])
    assert proof.exit_code == 2 and proof.missing == ["planted::count"]
    assert "NOT REACHED: planted::count" in proof.table()


def test_zero_frames_is_exit_2():
    proof = prove("proof_programs:clean", frames=0)
    assert proof.frames == 0 and proof.exit_code == 2 and "nothing was proved" in proof.table()


def test_building_may_wait_but_is_not_a_frame():
    proof = prove("proof_programs:slow_start")
    assert proof.ok and proof.frames == 2


def test_a_proof_touches_no_device():
    proof = prove("proof_programs:sees_no_gpu")
    assert proof.exit_code == 0, proof.table()


def test_exception_in_a_frame_is_a_finding_with_its_line():
    proof = prove("proof_programs:raises")
    (finding,) = proof.report.by_rule("unproven")
    assert "ZeroDivisionError" in finding.detail and finding.site.code == "return 1 / (len(e.x) - 8)"


def test_deliberate_exception_is_listed():
    proof = prove("proof_programs:allowed")
    assert proof.ok
    (entry,) = proof.report.allowed
    assert entry.reason == "first token" and entry.hits == {"host-read": 2}


@pytest.mark.parametrize(
    ("target", "word"), [("proof_programs:fails", "no weights here"), ("proof_programs:absent", "cannot be loaded")]
)
def test_program_that_cannot_be_built_is_exit_2(target, word):
    proof = prove(target)
    assert proof.exit_code == 2 and word in proof.error


def test_timeout_is_an_error_not_a_proof():
    proof = prove("proof_programs:clean", timeout_s=0.05)
    assert proof.exit_code == 2 and "no result after" in proof.error


@pytest.mark.parametrize("target", ["noname", "a:b:c", ":x", "x:"])
def test_malformed_target(target):
    with pytest.raises(AuditError, match="module:function"):
        prove(target)
