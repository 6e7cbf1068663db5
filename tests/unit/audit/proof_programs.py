"""Programs for the proof: each builds on fake CUDA tensors and returns one frame."""

import torch
from planted_forms import Env

from slipstream.audit import Program, allow_sync


def many():
    e = Env()

    def frame():
        e.x.sum().item()
        y = e.x[e.x > 0]
        torch.tensor(len(y), device="cuda:0")
        torch.cuda.synchronize()

    return Program(frame, 2)


def loops():
    e = Env()

    def frame():
        steps = 0
        while (e.x > 0).all():
            steps += 1
        while not (e.x > 0).all():
            steps += 1
        assert 0 < steps < 10
        assert sum(e.n.cpu().tolist()) == 8
        assert e.x.cpu().numpy().shape == (8,)
        assert int(e.host_index.sum()) == 1  # a host value that never saw the device keeps its value

    return Program(frame, 1)


def clean():
    e = Env()

    def frame():
        torch.ops.planted.twice(e.x)

    return frame, 2, ("planted::twice",)


def slow_start():
    e = Env()
    e.x.sum().item()
    start = torch.tensor([1.0], device="cuda")
    torch.cuda.synchronize()
    return Program(lambda: e.x + start, 2)


def raises():
    e = Env()

    def frame():
        return 1 / (len(e.x) - 8)

    return Program(frame, 1)


def allowed():
    e = Env()

    def frame():
        with allow_sync("first token"):
            e.x.sum().item()

    return Program(frame, 2)


def fails():
    raise FileNotFoundError("no weights here")


def sees_no_gpu():
    """A proof never touches a real device, wherever it runs; attention must not ask one either."""
    q = torch.ones(1, 4, 8, 16, device="cuda:0", dtype=torch.bfloat16)

    def frame():
        y = torch.nn.functional.scaled_dot_product_attention(q, q[:, :2], q[:, :2], is_causal=True, enable_gqa=True)
        assert y.shape == q.shape and y.device.type == "cuda"
        assert not torch.cuda.is_initialized() and not torch.cuda.is_available()

    return Program(frame, 2)
