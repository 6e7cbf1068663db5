"""Planted forms that move values to the device, or wait for it by name."""

import torch
from planted_env import form


@form
def bad_literal(e):
    return torch.tensor(3, device=e.dev)  # plant: tensor-literal


@form
def good_literal(e):
    return torch.full((), 3, device=e.dev)


@form
def bad_as_tensor(e):
    return torch.as_tensor([1, 2], device=e.dev)  # plant: tensor-literal


@form
def good_as_tensor(e):
    return torch.as_tensor(e.x, device=e.dev), torch.arange(1, 3, device=e.dev)


@form
def bad_new_tensor(e):
    return e.x.new_tensor([1.0, 2.0])  # plant: tensor-literal


@form
def good_new_tensor(e):
    return e.x.new_zeros(2), torch.tensor([1.0, 2.0])


@form
def bad_list_of_scalars(e):
    return torch.tensor([e.x[0], e.x[1]], device=e.dev)  # plant: tensor-from-scalars


@form
def good_list_of_scalars(e):
    return torch.stack([e.x[0], e.x[1]])


@form
def bad_list_index(e):
    return e.x[[0, 1]]  # plant: host-index


@form
def good_list_index(e):
    return e.x[0:2], e.x[e.index], e.xx[0, :, None]


@form
def bad_host_index(e):
    return e.x[e.host_index]  # plant: host-index


@form
def good_host_index(e):
    return e.x.index_select(0, e.index)


@form
def bad_pageable(e):
    return e.host.to(e.dev)  # plant: pageable-copy


@form
def good_pageable(e):
    return e.pin.to(e.dev, non_blocking=True)


@form
def bad_pageable_non_blocking(e):
    return e.host.to(e.dev, non_blocking=True)  # plant: pageable-copy


@form
def good_pageable_non_blocking(e):
    e.xx.copy_(e.pin, non_blocking=True)


@form
def bad_pageable_copy(e):
    e.x.copy_(e.host, non_blocking=True)  # plant: pageable-copy


@form
def good_pageable_copy(e):
    e.x.copy_(e.out, non_blocking=True)


@form
def bad_store_number(e):
    e.x[0] = 3.0  # plant: pageable-copy


@form
def good_store_number(e):
    e.x[0:1] = 3.0
    e.x.fill_(3)
    e.x + torch.tensor(2.0)


@form
def bad_strided(e):
    return e.pin[:, ::2].to(e.dev, non_blocking=True)  # plant: strided-copy


@form
def good_strided(e):
    return e.pin.t().to(e.dev, non_blocking=True)  # dense: the device tensor takes the same strides


@form
def bad_strided_copy(e):
    e.xx.copy_(e.pin.t(), non_blocking=True)  # plant: strided-copy


@form
def good_strided_copy(e):
    e.xx[1:3].copy_(e.pin[1:3], non_blocking=True)


@form
def bad_converted(e):
    e.half.copy_(e.pin)  # plant: strided-copy


@form
def good_converted(e):
    e.half.copy_(e.xx)
    e.half.copy_(e.pin, non_blocking=True)  # the device converts


@form
def bad_spread(e):
    e.xx.copy_(e.pin[0], non_blocking=True)  # plant: strided-copy


@form
def good_spread(e):
    e.xx[0].copy_(e.pin[0], non_blocking=True)
    e.wider[:, ::2].copy_(e.pin, non_blocking=True)  # strides of the device side cost the host nothing


@form
def bad_move(e):
    return e.host.cuda() if e.dev.type == "cuda" else e.host.to(e.dev)  # plant: pageable-copy


@form
def good_move(e):
    return e.out.to(e.dev, torch.float16, non_blocking=True)


@form
def bad_blocking(e):
    e.xx.copy_(e.pin)  # plant: blocking-copy


@form
def good_blocking(e):
    e.xx.copy_((e.xx + 1).t())


@form
def bad_pin_memory(e):
    return e.host.pin_memory()  # plant: pin-memory


@form
def good_pin_memory(e):
    return e.pin


@form
def bad_pinned_factory(e):
    return torch.empty(4, pin_memory=True)  # plant: pin-memory


@form
def good_pinned_factory(e):
    return torch.empty(4, pin_memory=False)


@form
def bad_synchronize(e):
    torch.cuda.synchronize()  # plant: explicit-sync


@form
def good_synchronize(e):
    torch.ops.planted.twice(e.x)


@form
def bad_empty_cache(e):
    torch.cuda.empty_cache()  # plant: explicit-sync


@form
def good_empty_cache(e):
    torch.empty(1, device=e.dev)


@form
def bad_event_wait(e):
    event = torch.cuda.Event()
    event.record()
    event.synchronize()  # plant: event-wait


@form
def good_event_wait(e):
    torch.cuda.Event().record()


@form
def bad_async_down(e):
    return e.x.to("cpu", non_blocking=True)  # plant: async-host-copy


@form
def bad_event_query(e):
    event = torch.cuda.Event()
    event.record()
    event.query()  # plant: event-query
