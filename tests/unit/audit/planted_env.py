"""What the planted forms share: their registry and the tensors that they use."""

import torch

PLANTS = {}
CLEAN = {}
NO_GUARD = {"bad_event_wait", "bad_event_query", "good_event_wait"}  # need real CUDA objects

torch.library.define("planted::count", "(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))


@torch.library.impl("planted::count", "CompositeExplicitAutograd")
def _count(x):
    return x.new_empty(1)


@torch.library.custom_op("planted::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _twice_fake(x):
    return torch.empty_like(x)


class Env:
    """Tensors that the forms use; all sizes are small."""

    def __init__(self, device="cuda:0"):
        self.dev = torch.device(device)
        self.x = torch.ones(8, device=self.dev)
        self.xx = torch.ones(4, 4, device=self.dev)
        self.n = torch.full((8,), 2, dtype=torch.int64, device=self.dev)
        self.index = torch.zeros(2, dtype=torch.int64, device=self.dev)
        self.half = torch.zeros(4, 4, dtype=torch.float16, device=self.dev)
        self.wider = torch.ones(4, 8, device=self.dev)
        self.host = torch.ones(8)
        self.host_index = torch.tensor([0, 1])
        self.pin = torch.ones(4, 4, pin_memory=True)
        self.out = torch.ones(8, pin_memory=True)
        self.wide = torch.ones(4, 8, pin_memory=True)


def form(f):
    (PLANTS if f.__name__.startswith("bad_") else CLEAN)[f.__name__] = f
    return f
