"""The auditor on a real CUDA device: the planted forms, memory growth, what torch's own mode misses, the trace."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "audit"))

import planted_forms
from planted import check_clean, check_planted

from slipstream.audit import profile, prove, watch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def env():
    return planted_forms.Env("cuda:0")


def watched(form, env):
    """The report of a second run: what the first call loads or allocates is no finding."""
    form(env)
    torch.cuda.synchronize()
    with watch() as report:
        form(env)
    return report


@pytest.mark.parametrize("name", list(planted_forms.PLANTS))
def test_plant_is_found(name, env):
    check_planted(name, watched(planted_forms.PLANTS[name], env))


@pytest.mark.parametrize("name", list(planted_forms.CLEAN))
def test_clean_twin_raises_no_alarm(name, env):
    report = watched(planted_forms.CLEAN[name], env)
    assert report.ok, report.table()
    check_clean(name, report)


@pytest.mark.parametrize("name", list(planted_forms.CLEAN))
def test_torchs_own_mode_agrees_that_the_twin_is_clean(name, env):
    form = planted_forms.CLEAN[name]
    form(env)
    torch.cuda.set_sync_debug_mode("error")
    try:
        form(env)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["bad_pageable_non_blocking", "bad_pageable_copy", "bad_strided", "bad_strided_copy"])
def test_torchs_own_mode_misses_these(name, env):
    form = planted_forms.PLANTS[name]
    form(env)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            form(env)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [w for w in caught if "synchron" in str(w.message)]
    assert watched(form, env).findings


def test_allocation_growth_and_counters():
    torch.cuda.empty_cache()
    with watch() as report:
        big = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        small = torch.empty(8, device="cuda")
    assert report.by_rule("allocation-growth")[0].site.code.startswith("big =")
    assert report.counters["allocations"] >= 2
    with watch() as again:
        del big, small
        torch.empty(512 << 20, dtype=torch.uint8, device="cuda")  # from the cache
    assert not again.by_rule("allocation-growth")


def test_saved_reference_to_synchronize_is_seen():
    from torch.cuda import synchronize

    with watch() as report:
        synchronize()
    assert [(f.rule, f.count) for f in report.findings] == [("explicit-sync", 1)]


def test_trace_counts_real_synchronisations(tmp_path, env):
    out = torch.empty(8, pin_memory=True)
    with profile(tmp_path / "trace.json") as result:
        for step in range(4):
            with torch.profiler.record_function("frame"):
                y = env.x * 2
                if step == 2:
                    y.sum().item()
                env.x.copy_(env.host, non_blocking=True)
                out.copy_(y, non_blocking=True)
    summary = result.summary
    assert len(summary.frames) == 4
    assert summary.frames[2].syncs.get("stream", 0) > summary.frames[0].syncs.get("stream", 0)
    copies = summary.total("copies")
    assert copies["HtoD pageable"] == 4 and copies["DtoH pinned"] >= 4
    assert all(f.kernels >= 1 and f.kernel_launches >= 1 for f in summary.frames)
    assert 0 < summary.idle_share < 1


def test_trace_of_a_captured_frame(tmp_path):
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(2):
        x.mul_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            x.mul_(1.0)
    with profile(tmp_path / "trace.json.gz") as result:
        for _ in range(5):
            with torch.profiler.record_function("frame"):
                graph.replay()
    assert [f.graph_launches for f in result.summary.frames] == [1] * 5
    assert [f.kernels for f in result.summary.frames] == [4] * 5
    assert result.summary.report().ok, result.summary.table()


def test_recompile_only_when_the_program_recompiles():
    f = torch.compile(lambda t, k: t * k, backend="eager", dynamic=False)
    x = torch.ones(8, device="cuda")
    f(x, 1)
    with watch() as report:
        f(x, 1)
        assert report.ok
        f(x, 2)
    assert [f.rule for f in report.findings] == ["recompile"]


@pytest.mark.parametrize(("which", "code"), [("bad", 1), ("good", 0)])
def test_proof_on_a_cuda_build_touches_no_device(which, code):
    before = torch.cuda.mem_get_info()[0]
    proof = prove("planted_forms:build", args=[which])
    assert proof.exit_code == code, proof.table()
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)  # no context of another process stays behind
