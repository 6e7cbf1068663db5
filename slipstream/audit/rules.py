"""The rules: a table of objects with an id, a severity, a test, a reason and a fix (`AuditRule`).

The first rule that matches an event names it, so the special ones stand before the general ones. To add a rule, pass
`watch(rules=[*RULES, mine])`.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.audit import matches
from slipstream.audit.events import AuditRule, Event, Rule

READ_FIX = (
    "keep the value on the device (torch.where, masks, index by tensor), or copy it to a pinned buffer with "
    "non_blocking=True, record an event and read it some frames later"
)
COPY_FIX = (
    "keep the value on the device, or write it into a preallocated pinned, contiguous buffer of the same dtype and "
    "copy with non_blocking=True"
)

RULES: tuple[Rule, ...] = (
    Rule(
        "tensor-from-scalars",
        "wait",
        "Each device scalar in the list is read by the host: one stream synchronisation per element, then a copy back.",
        "torch.stack(list) or torch.cat on the device",
        matches.tensor_from_scalars,
    ),
    Rule(
        "tensor-literal",
        "wait",
        "Python values are built in pageable host memory and copied: a copy and a stream synchronisation per call.",
        "torch.full / torch.zeros / torch.arange with device=, or build it once outside the loop",
        matches.tensor_literal,
    ),
    Rule(
        "host-index",
        "wait",
        "An index that lives on the host is copied to the device, from pageable memory, each time it is used.",
        "build the index on the device once, or use a slice, gather or index_select with a device tensor",
        matches.host_index,
    ),
    Rule(
        "pin-memory",
        "cost",
        "Pinning locks pages through the driver (often milliseconds, and it can wait for the device).",
        "allocate the pinned buffer once before the loop and reuse it",
        matches.pin,
    ),
    Rule(
        "host-read",
        "wait",
        "The host waits until the device has finished everything queued before it, to learn one value.",
        READ_FIX,
        matches.host_read,
    ),
    Rule(
        "host-copy",
        "wait",
        "The host waits until the device has finished everything queued before it, and for the copy.",
        READ_FIX,
        matches.host_array,
    ),
    Rule(
        "async-host-copy",
        "note",
        "The copy does not block, but it takes pinned memory per call, and the value comes later.",
        "copy_ into a preallocated pinned buffer with non_blocking=True and record an event",
        matches.async_host_array,
    ),
    Rule(
        "nonzero",
        "wait",
        "The number of results decides a shape, so the host waits for it.",
        "keep the mask and use torch.where, or torch.nonzero_static(size=...)",
        matches.simple("has a result whose size the host must read", "aten.nonzero", "aten.argwhere"),
    ),
    Rule(
        "masked-select",
        "wait",
        "The number of results decides a shape, so the host waits for it.",
        "torch.where with a fill value, or a fixed-size gather",
        matches.simple("has a result whose size the host must read", "aten.masked_select"),
    ),
    Rule(
        "boolean-index",
        "wait",
        "A boolean index becomes nonzero(): the host waits for the number of true elements.",
        "torch.where(mask, a, b), masked_fill, or index by a tensor of fixed size",
        matches.bool_index,
    ),
    Rule(
        "repeat-interleave",
        "wait",
        "Without output_size the sum of the repeats is read from the device.",
        "pass output_size=, or use searchsorted over the cumulated lengths",
        matches.repeat_interleave,
    ),
    Rule(
        "unique",
        "wait",
        "The number of distinct values decides a shape, so the host waits for it.",
        "sort and compare neighbours, or scatter into a table of fixed size",
        matches.simple(
            "has a result whose size the host must read",
            *("aten._unique", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive"),
            "aten.unique_dim_consecutive",
        ),
    ),
    Rule(
        "bincount",
        "wait",
        "The largest value decides a shape (minlength does not change that), so the host waits for it.",
        "torch.zeros(n, device=...).scatter_add_ with a fixed n",
        matches.simple("has a result whose size the host must read", "aten.bincount"),
    ),
    Rule(
        "data-dependent",
        "wait",
        "The result's shape or a host value depends on device data, so the host waits for it.",
        "use an operation with a fixed output size",
        matches.data_dependent,
    ),
    Rule(
        "pageable-copy",
        "wait",
        "The driver stages a copy from pageable memory itself: whatever non_blocking says, the host copies, and waits "
        "for the stream unless the copy is small; torch's sync debug mode does not report it with non_blocking=True.",
        COPY_FIX,
        matches.pageable,
    ),
    Rule(
        "strided-copy",
        "wait",
        "The data first goes through a pageable temporary on the host: its layout does not fit, or a blocking copy "
        "converts it there.",
        "make the pinned buffer contiguous and of the target's shape, pass non_blocking=True; convert and transpose on "
        "the device",
        matches.strided,
    ),
    Rule(
        "blocking-copy",
        "wait",
        "The source is pinned, but the call still waits for the copy and all work before it.",
        "pass non_blocking=True and reuse the buffer only after an event",
        matches.blocking_upload,
    ),
    Rule(
        "explicit-sync",
        "wait",
        "The host waits for everything queued on the stream or device.",
        "order work by stream or event on the device, and read results late",
        matches.host("sync"),
    ),
    Rule(
        "event-wait",
        "wait",
        "The host waits for an event.",
        "wait only for work that is some frames old, under allow_sync with that reason",
        matches.host("event.synchronize"),
    ),
    Rule(
        "event-query",
        "note",
        "A query does not block, but polling burns host time and takes the driver's lock.",
        "query once per frame at most",
        matches.host("event.query"),
    ),
    Rule(
        "stream-wait",
        "note",
        "One stream waits for another on the device; the host does not.",
        "keep a decode loop on one stream if the order allows it",
        matches.host("stream.wait"),
    ),
    Rule(
        "allocation-growth",
        "cost",
        "The allocator asked the driver for new memory: cudaMalloc and cudaHostAlloc are slow and may synchronise.",
        "allocate before the loop, keep shapes fixed, or warm up with the largest shapes",
        matches.host("memory.growth"),
    ),
    Rule(
        "recompile",
        "cost",
        "Code was compiled inside the region: the host stops for milliseconds to seconds.",
        "fix the shapes and branches that the guards depend on, and compile before the loop",
        matches.host("compile"),
    ),
    Rule(
        "unproven",
        "wait",
        "The code raised under fake tensors; what follows in this frame was not checked.",
        "move events, streams, graphs and data access out of the frame function",
        matches.host("unproven"),
    ),
)

BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}


def find_rule(event: Event, rules: Sequence[AuditRule] = RULES) -> tuple[AuditRule, str] | None:
    """The first rule that matches, with what it says happened."""
    for rule in rules:
        detail = rule.match(event)
        if detail is not None:
            return rule, detail
    return None
