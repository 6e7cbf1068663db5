"""The auditor on a real CUDA device: the planted forms, what really blocks, memory growth, the trace, the proof."""

import contextlib
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


BUSY_S = 0.2
"""The device sleeps this long in the tests that time the host."""


@pytest.fixture(scope="module")
def env():
    return planted_forms.Env("cuda:0")


@contextlib.contextmanager
def sync_debug(mode):
    """torch's own mode; switching it on warns once that it is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def blocks(form, env):
    """Whether the host waits in a form while the device is busy: 200 ms of sleep are queued before it."""
    form(env)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(), torch.cuda.Event()
    start.record()
    torch.cuda._sleep(int(BUSY_S * 1.98e9))
    end.record()
    form(env)
    over = end.query()
    torch.cuda.synchronize()
    return over


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
    with sync_debug("error"):
        form(env)


@pytest.mark.parametrize("name", list(planted_forms.CLEAN))
def test_clean_twin_does_not_block_the_host(name, env):
    assert not blocks(planted_forms.CLEAN[name], env)


# Waits by their rule, but not always: pinning and freeing may go without a wait, and small pageable uploads do.
MAY_PASS = {
    "bad_pin_memory", "bad_pinned_factory", "bad_empty_cache", "bad_async_down", "bad_event_query", "bad_tagged",
    "bad_pageable_non_blocking", "bad_pageable_copy", "bad_strided", "bad_strided_copy", "bad_spread",
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in planted_forms.PLANTS if n not in MAY_PASS])
def test_plant_blocks_the_host(name, env):
    assert blocks(planted_forms.PLANTS[name], env)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_large_pageable_copy_blocks_whatever_its_flag_says(pinned, env):
    source = torch.ones(32 << 20, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty_like(source, device="cuda")
    assert blocks(lambda _: target.copy_(source, non_blocking=True), env) == (not pinned)


@pytest.mark.parametrize("name", ["bad_pageable_non_blocking", "bad_pageable_copy", "bad_strided", "bad_strided_copy"])
def test_torchs_own_mode_misses_these(name, env):
    form = planted_forms.PLANTS[name]
    form(env)
    with sync_debug("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        form(env)
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
@pytest.mark.parametrize("mode", ["normal", "inference"])
def test_proof_on_a_cuda_build(which, code, mode):
    proof = prove("planted_forms:build", args=[which, mode])
    assert not proof.error and proof.exit_code == code, proof.table()
    functions = planted_forms.PLANTS if which == "bad" else planted_forms.CLEAN
    for name in functions:
        if name not in planted_forms.NO_GUARD:
            (check_planted if which == "bad" else check_clean)(name, proof.report)


def test_proof_on_a_cuda_build_sees_no_device():
    proof = prove("proof_programs:sees_no_gpu")
    assert proof.exit_code == 0, proof.table()


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_our_frame_is_proved_on_a_cuda_build(kind):
    proof = prove("slipstream.benchmark.frame_program:build", args=[kind])
    assert proof.exit_code == 0, proof.table()
