"""`watch` on a machine without a GPU: reads with the CPU as the device, copies with the meta device."""

import asyncio
import threading
import types
import warnings

import pytest
import torch
from planted_forms import Env  # registers planted::count

from slipstream.audit import RULES, AuditError, allow_sync, mark_staging, watch
from slipstream.audit.events import Rule

assert Env


def line_of(report, rule):
    """The source text of the only finding of a rule."""
    (finding,) = report.by_rule(rule)
    return finding.site.code


@pytest.fixture
def x():
    return torch.arange(4.0)


# --- reads -----------------------------------------------------------------------------------------------

READS = {
    "host-read": [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: int(x[1]),
        lambda x: float(x[1]),
        lambda x: str(x),
        lambda x: f"{x[0]:.2f}",
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: list(range(x.long()[1])),
        lambda x: torch.nn.functional.one_hot(x.long()),
        lambda x: torch.linalg.inv(torch.eye(2)),
        lambda x: 1.0 in x,
    ],
    "host-copy": [lambda x: x.tolist(), lambda x: x.numpy()],
    "nonzero": [lambda x: x.nonzero(), lambda x: torch.where(x > 0), lambda x: torch.argwhere(x)],
    "masked-select": [lambda x: x.masked_select(x > 1)],
    "boolean-index": [lambda x: x[x > 1], lambda x: x.__setitem__(x > 1, x[2:] * 2)],
    "repeat-interleave": [lambda x: torch.repeat_interleave(x, x.long())],
    "unique": [lambda x: x.unique(), lambda x: torch.unique_consecutive(x), lambda x: torch.unique(x[None], dim=1)],
    "bincount": [lambda x: torch.bincount(x.long())],
    "tensor-from-scalars": [lambda x: torch.tensor([x[0], x[1]])],
    "data-dependent": [lambda x: torch.ops.planted.count(x)],
}
CLEAN = [
    lambda x: torch.where(x > 0, x, 0.0).sum(),
    lambda x: (len(x), x.shape, x.dtype, x.dim(), x.numel(), x.is_contiguous()),
    lambda x: x[torch.zeros(2, dtype=torch.int64)],
    lambda x: torch.repeat_interleave(x, 2),
    lambda x: torch.repeat_interleave(x, x.long(), output_size=6),
    lambda x: torch.stack([x[0], x[1]]),
    lambda x: torch.nonzero_static(x, size=4),
    lambda x: x.clone().index_put_((x.long(),), x),
    lambda x: (x.sort(), x.topk(2), x.cumsum(0), x.softmax(0), x.multinomial(1)),
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("rule", "index"), [(r, i) for r, fs in READS.items() for i in range(len(fs))])
def test_read_is_found(rule, index, inference, x):
    with watch(device="cpu") as report, torch.inference_mode(inference):
        READS[rule][index](x)
    assert [f.rule for f in report.findings] == [rule]
    assert report.findings[0].site.file == __file__
    assert report.findings[0].site.code.startswith(("lambda", f'"{rule}"', '"'))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("index", range(len(CLEAN)))
def test_clean_form_raises_no_alarm(index, inference, x):
    with watch(device="cpu") as report, torch.inference_mode(inference):
        CLEAN[index](x)
    assert report.ok and report.exit_code == 0, report.table()


def test_rules_are_complete():
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids) and len(ids) >= 20
    assert all(rule.explain and rule.fix and rule.severity in ("wait", "cost", "note") for rule in RULES)


# --- copies ----------------------------------------------------------------------------------------------


def test_copies_that_torchs_sync_debug_mode_misses():
    device = torch.empty(4, 4, device="meta")
    staged = mark_staging(torch.ones(4, 4))
    with watch(device="meta") as report:
        device.copy_(torch.ones(4, 4), non_blocking=True)
        device.copy_(staged.t(), non_blocking=True)
        device.copy_(staged, non_blocking=True)
    assert [(f.rule, f.site.code.split("(")[1][:6]) for f in report.findings] == [
        ("pageable-copy", "torch."),
        ("strided-copy", "staged"),
    ]


def test_is_pinned_can_be_replaced():
    device, host = torch.empty(4, device="meta"), torch.ones(4)
    with watch(device="meta", is_pinned=lambda t: t is host) as report:
        device.copy_(host, non_blocking=True)
        device.copy_(host[:], non_blocking=True)
    assert len(report.findings) == 1 and report.findings[0].rule == "pageable-copy"


def test_staging_mark_goes_with_the_storage():
    device = torch.empty(2, device="meta")
    ring = mark_staging(torch.ones(8))
    with watch(device="meta") as report:
        device.copy_(ring[2:4], non_blocking=True)  # a view is staged too
        device.copy_(ring.clone()[2:4], non_blocking=True)
    assert [f.rule for f in report.findings] == ["pageable-copy"]


# --- stack, scope and policy -------------------------------------------------------------------------------


def helper(t):
    return t.sum().item()


def test_stack_starts_at_the_users_line(x):
    with watch(device="cpu") as report:
        helper(x)
    stack = report.findings[0].stack
    assert [s.function for s in stack[:2]] == ["helper", "test_stack_starts_at_the_users_line"]
    assert stack[0].code == "return t.sum().item()" and stack[1].code == "helper(x)"
    assert not any("torch" in s.file.split("/")[-2:] for s in stack)
    assert "helper(x)" not in report.table() and "called from" in report.table(stacks=True)


def test_same_place_is_counted_not_repeated(x):
    with watch(device="cpu") as report:
        for _ in range(5):
            helper(x)
    assert [f.count for f in report.findings] == [5]


def test_nothing_is_seen_before_and_after(x):
    helper(x)
    with watch(device="cpu") as report:
        pass
    helper(x)
    assert report.ok


def test_other_threads_are_not_watched(x):
    with watch(device="cpu") as report:
        thread = threading.Thread(target=lambda: (helper(x), _sync()))
        thread.start()
        thread.join()
    assert report.ok


def test_two_threads_with_their_own_watches(x):
    reports = {}
    barrier = threading.Barrier(2)

    def work(name, waits):
        with watch(device="cpu", recompiles=False) as report:
            barrier.wait()
            for _ in range(waits):
                _sync()
            barrier.wait()
        reports[name] = sum(f.count for f in report.findings)

    threads = [threading.Thread(target=work, args=(n, n)) for n in (1, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert reports == {1: 1, 3: 3}


def test_other_asyncio_tasks_are_not_watched(x):
    async def main():
        gate = asyncio.Event()

        async def other():
            await gate.wait()
            helper(x)

        task = asyncio.create_task(other())
        with watch(device="cpu") as report:
            gate.set()
            await task
            x.tolist()
        return report

    assert [f.rule for f in asyncio.run(main()).findings] == ["host-copy"]


def _sync():
    try:
        torch.cuda.synchronize()
    except AssertionError:  # a build without CUDA
        pass


def test_patches_are_shared_and_restored(x):
    before = (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.cuda.Stream.wait_event)
    with watch(device="cpu") as outer:
        patched = torch.cuda.synchronize
        assert patched is not before[0]
        with watch(device="cpu") as inner:
            assert torch.cuda.synchronize is patched
            _sync()
        assert torch.cuda.synchronize is patched
    assert (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.cuda.Stream.wait_event) == before
    assert [f.rule for f in outer.findings] == [f.rule for f in inner.findings] == ["explicit-sync"]


def test_restored_after_an_exception(x):
    before = torch.cuda.synchronize
    with pytest.raises(KeyError):
        with watch(device="cpu"):
            raise KeyError("x")
    assert torch.cuda.synchronize is before
    assert torch.overrides._get_current_function_mode() is None


CUDA_CALLS = {
    "event-wait": [lambda: torch.cuda.Event.synchronize(object())],
    "event-query": [lambda: torch.cuda.Event.query(object()), lambda: torch.cuda.Stream.query(object())],
    "explicit-sync": [lambda: torch.cuda.Stream.synchronize(object()), lambda: torch.cuda.empty_cache()],
    "stream-wait": [
        lambda: torch.cuda.Event.wait(object(), object()),
        lambda: torch.cuda.Stream.wait_event(object(), object()),
    ],
}


@pytest.mark.parametrize(("rule", "index"), [(r, i) for r, fs in CUDA_CALLS.items() for i in range(len(fs))])
def test_waits_of_streams_and_events(rule, index):
    with watch() as report:
        try:
            CUDA_CALLS[rule][index]()
        except (TypeError, AttributeError, AssertionError, RuntimeError):
            pass  # no stream can be made here; the call itself is what counts
    found = report.by_rule(rule)
    assert len(found) == 1 and found[0].count == 1
    assert report.ok == (rule in ("event-query", "stream-wait"))


def test_blocking_functions_of_other_libraries():
    with watch(also=["test_audit_fake_library:Stream.join"]) as report:
        import test_audit_fake_library as library

        assert library.Stream().join() == "joined"
    assert [f.rule for f in report.findings] == ["explicit-sync"]
    assert "test_audit_fake_library.Stream.join" in report.findings[0].detail
    with pytest.raises(AuditError, match="does not name a function"):
        watch(also=["test_audit_fake_library:Stream.nothing"]).__enter__()


@pytest.fixture(autouse=True)
def fake_library(monkeypatch):
    module = types.ModuleType("test_audit_fake_library")

    class Stream:
        def join(self):
            return "joined"

    module.Stream = Stream
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)


def test_allow_sync_is_listed_with_hits_and_without(x):
    @allow_sync("once per request", rules=["host-read"])
    def admit():
        x.sum().item()
        x.nonzero()

    with watch(device="cpu") as report:
        admit()
        with allow_sync("never used"):
            pass
    assert [f.rule for f in report.findings] == ["nonzero"]  # the exception names another rule
    assert {a.reason: a.hits for a in report.allowed} == {"once per request": {"host-read": 1}, "never used": {}}
    assert "once per request" in report.table() and "nothing happened inside" in report.table()
    with pytest.raises(AuditError, match="needs a reason"):
        allow_sync(" ")


def test_raise_stops_at_the_line(x):
    with pytest.raises(AuditError, match=r"host-read at .*test_audit_runtime.py:\d+.*Fix:"):
        with watch(device="cpu", on_finding="raise"):
            helper(x)
            pytest.fail("not reached")


def test_warn_once_per_place(x):
    with pytest.warns(UserWarning, match="host-read") as caught:
        with watch(device="cpu", on_finding="warn"):
            for _ in range(3):
                helper(x)
    assert len(caught) == 1


def test_only_what_is_below_a_function(x):
    class Engine:
        def step(self):
            return helper(x)

    with watch(device="cpu", only=["Engine.step"]) as report:
        x.tolist()
        Engine().step()
    assert [f.rule for f in report.findings] == ["host-read"]


def test_decorator_sums_up_its_calls(x):
    @watch(device="cpu")
    def step(t):
        return helper(t)

    step(x)
    step(x)
    helper(x)
    assert [f.count for f in step.report.findings] == [2]
    with pytest.raises(AuditError, match="async"):

        @watch()
        async def later():
            pass


def test_wrong_use(x):
    with pytest.raises(AuditError, match="on_finding='loud'"):
        watch(on_finding="loud")
    with pytest.raises(AuditError, match="lists of names"):
        watch(only="step")
    region = watch(device="cpu")
    with region, pytest.raises(AuditError, match="already open"):
        region.__enter__()


def test_rules_can_be_added_and_left_out(x):
    mine = Rule("no-sort", "cost", "slow", "keep it sorted", lambda e: "sorted" if e.name == "aten.sort" else None)
    rules = [mine, *(r for r in RULES if r.id not in ("host-read", "data-dependent"))]
    with watch(device="cpu", rules=rules) as report:
        helper(x)
        x.sort()
    assert [f.rule for f in report.findings] == ["no-sort"]


# --- memory and compilation --------------------------------------------------------------------------------


def test_allocation_growth_is_found_at_its_line(x):
    taken = [100]
    with watch(device="cpu", memory=lambda: taken[0]) as report:
        y = x + 1
        taken[0] += 3 << 20
        y = y + 2  # the growth shows here
        y = y + 3
    assert line_of(report, "allocation-growth") == "y = y + 2  # the growth shows here"
    assert "3.0 MiB" in report.findings[0].detail


def test_growth_that_no_operation_shows_belongs_to_the_region():
    taken = [0]
    with watch(device="cpu", memory=lambda: taken[0]) as report:
        taken[0] += 1 << 20
    assert [f.rule for f in report.findings] == ["allocation-growth"]


@pytest.fixture
def compiled():
    count = [0]

    def backend(module, _):
        count[0] += 1
        return module.forward

    @torch.compile(backend=backend, dynamic=False)
    def f(x, k):
        return x.sin() * k

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield f, count
        torch._dynamo.reset()


def test_recompile_is_found_and_the_watch_causes_none(compiled, x):
    f, count = compiled
    f(x, 1)
    f(x, 2)
    before = count[0]
    with watch(device="cpu") as report:
        f(x, 1)
        f(x, 2)
        assert report.ok and count[0] == before  # compiled code is not compiled again for our sake
        f(x, 3)
        x.sum().item()  # the watch still sees, after compiled code has run
    assert count[0] == before + 1
    assert line_of(report, "recompile") == "f(x, 3)"
    assert [f.rule for f in report.findings] == ["recompile", "host-read"]
    f(x, 1)
    f(x, 3)
    assert count[0] == before + 1


def test_compilation_that_fails_leaves_no_mode_behind(x):
    def backend(module, _):
        raise ZeroDivisionError

    f = torch.compile(lambda t: t.sin(), backend=backend)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        with watch(device="cpu"):
            f(x)
    assert torch.overrides._get_current_function_mode() is None
    with watch(device="cpu") as report:
        x.tolist()
    assert [f.rule for f in report.findings] == ["host-copy"]
    torch._dynamo.reset()


def test_triton_compilation_is_found(monkeypatch, x):
    calls = []
    runtime = types.SimpleNamespace(jit_post_compile_hook=lambda **kw: calls.append(kw))
    fake = types.SimpleNamespace(knobs=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(__import__("sys").modules, "triton", fake)
    earlier = runtime.jit_post_compile_hook
    with watch(device="cpu") as report:
        runtime.jit_post_compile_hook(fn=types.SimpleNamespace(name="paged_attention"), key="k")
        x.sum().item()
    assert runtime.jit_post_compile_hook is earlier and len(calls) == 1
    assert [f.rule for f in report.findings] == ["recompile", "host-read"]
    assert "paged_attention" in report.findings[0].detail


def test_a_torch_without_compile_callbacks_is_watched_all_the_same(monkeypatch, x):
    monkeypatch.setitem(__import__("sys").modules, "torch._dynamo.callback", None)
    with pytest.warns(UserWarning, match="recompiles by torch.compile cannot be seen"):
        with watch(device="cpu") as report:
            x.tolist()
    assert [f.rule for f in report.findings] == ["host-copy"]


def test_training_step_and_higher_order_operations_run_as_always(x):
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    expected = torch.cond(torch.tensor(True), lambda t: t.sin(), lambda t: t.cos(), (x,))
    with watch(device="cpu", recompiles=False) as report:
        layer(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        got = torch.cond(torch.tensor(True), lambda t: t.sin(), lambda t: t.cos(), (x,))
    assert torch.equal(got, expected) and layer.weight.grad is not None
    assert report.ok, report.table()
    torch._dynamo.reset()
