"""Forms that wait, each with a clean form that does the same work.

`# plant: RULE` marks the line where the rule must be found. The functions of `PLANTS` and `CLEAN` go together by
name: `bad_item` and `good_item`. The same forms run under fake CUDA tensors and on a real GPU.
"""

import torch
from planted_env import CLEAN, NO_GUARD, PLANTS, Env, form


@form
def bad_item(e):
    return e.x.sum().item()  # plant: host-read


@form
def good_item(e):
    return e.x.sum().clamp(0, 1)


@form
def bad_truth(e):
    if e.x.sum() > 0:  # plant: host-read
        return 1


@form
def good_truth(e):
    return torch.where(e.x.sum() > 0, 1, 0)


@form
def bad_while(e):
    while e.x.sum() < 0:  # plant: host-read
        e.x.add_(1)


@form
def good_while(e):
    for _ in range(3):
        e.x.add_(0)


@form
def bad_assert(e):
    assert (e.n == 2).all(), "never read on the host"  # plant: host-read


@form
def good_assert(e):
    assert e.n.shape == (8,)


@form
def bad_int(e):
    return int(e.n[0])  # plant: host-read


@form
def good_int(e):
    return int(e.n.shape[0])


@form
def bad_float(e):
    return float(e.x.max())  # plant: host-read


@form
def good_float(e):
    return e.x.max().float()


@form
def bad_range(e):
    for _ in range(e.n[0]):  # plant: host-read
        pass


@form
def good_range(e):
    for _ in range(len(e.n)):
        pass


@form
def bad_slice(e):
    return e.x[: e.n[0]]  # plant: host-read


@form
def good_slice(e):
    return e.x[:2]


@form
def bad_print(e):
    return f"{e.x}"  # plant: host-read


@form
def good_print(e):
    return f"{e.x.shape} {e.x.dtype} {e.x.device}"


@form
def bad_equal(e):
    return torch.equal(e.x, e.x.clone())  # plant: host-read


@form
def good_equal(e):
    return (e.x == e.x).all()


@form
def bad_one_hot(e):
    return torch.nn.functional.one_hot(e.n)  # plant: host-read


@form
def good_one_hot(e):
    return (e.n[:, None] == torch.arange(4, device=e.dev)).long()


@form
def bad_tolist(e):
    return e.x.tolist()  # plant: host-*


@form
def good_tolist(e):
    return list(e.x.shape)


@form
def bad_cpu(e):
    return e.x.cpu()  # plant: host-copy


@form
def good_cpu(e):
    e.out.copy_(e.x, non_blocking=True)


@form
def bad_to_cpu(e):
    return e.x.to("cpu")  # plant: host-copy


@form
def good_to_cpu(e):
    return e.x.to(e.dev)


@form
def bad_copy_down_pageable(e):
    e.host.copy_(e.x, non_blocking=True)  # plant: host-copy


@form
def good_copy_down_pageable(e):
    e.out.copy_(e.x * 2, non_blocking=True)


@form
def bad_copy_down_blocking(e):
    e.out.copy_(e.x)  # plant: host-copy


@form
def good_copy_down_blocking(e):
    e.out[2:4].copy_(e.x[2:4], non_blocking=True)


@form
def bad_copy_down_strided(e):
    e.wide[:, :4].copy_(e.xx, non_blocking=True)  # plant: host-copy


@form
def good_copy_down_strided(e):
    e.pin.copy_(e.xx.t(), non_blocking=True)
    e.pin.copy_(e.half, non_blocking=True)  # converted on the device


@form
def bad_nonzero(e):
    return e.x.nonzero()  # plant: nonzero


@form
def good_nonzero(e):
    return torch.nonzero_static(e.x, size=8) if e.dev.type == "cpu" else e.x != 0


@form
def bad_where(e):
    return torch.where(e.x > 0)  # plant: nonzero


@form
def good_where(e):
    return torch.where(e.x > 0, e.x, 0.0)


@form
def bad_masked_select(e):
    return e.x.masked_select(e.x > 0)  # plant: masked-select


@form
def good_masked_select(e):
    return e.x.masked_fill(e.x > 0, 0.0)


@form
def bad_boolean_index(e):
    return e.x[e.x > 0]  # plant: boolean-index


@form
def good_boolean_index(e):
    return e.x[e.index]


@form
def bad_boolean_store(e):
    e.x[e.x > 0] = e.x[:1] * 1  # plant: boolean-index


@form
def good_boolean_store(e):
    e.x[e.x > 2] = 0.0
    e.x[e.index] = e.x[:2] * 1


@form
def bad_repeat_interleave(e):
    return torch.repeat_interleave(e.x, e.n)  # plant: repeat-interleave


@form
def good_repeat_interleave(e):
    a = torch.repeat_interleave(e.x, e.n, output_size=16)
    return a, e.x.repeat_interleave(3)


@form
def bad_unique(e):
    return torch.unique(e.x, return_counts=True)  # plant: unique


@form
def good_unique(e):
    return e.x.sort().values.diff() != 0


@form
def bad_unique_consecutive(e):
    return torch.unique_consecutive(e.x)  # plant: unique


@form
def good_unique_consecutive(e):
    return e.x[1:] != e.x[:-1]


@form
def bad_bincount(e):
    return torch.bincount(e.n, minlength=4)  # plant: bincount


@form
def good_bincount(e):
    return torch.zeros(4, dtype=torch.int64, device=e.dev).scatter_add_(0, e.n, torch.ones_like(e.n))


@form
def bad_tagged(e):
    return torch.ops.planted.count(e.x)  # plant: data-dependent


@form
def good_tagged(e):
    return torch.ops.planted.twice(e.x)


import planted_copies  # noqa: F401  (its forms come after these)

NOTES = {"bad_async_down", "bad_event_query"}  # reported, but no failures: they have no clean twin


def build(which, mode="normal"):
    """A program for the proof: frame number i runs form number i."""
    e = Env()
    forms = {"bad": PLANTS, "good": CLEAN}[which]
    todo = iter([f for name, f in forms.items() if name not in NO_GUARD])
    count = sum(name not in NO_GUARD for name in forms)

    def frame():
        with torch.inference_mode(mode == "inference"):
            next(todo)(e)

    return frame, count, ("planted::twice",) if which == "good" else ()
