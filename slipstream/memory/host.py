"""Host allocator settings for the CPU backend."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 64 << 20


def keep_large_temporaries() -> bool:
    """Let glibc keep freed blocks of up to 64 MiB instead of giving them back to the system.

    A frame allocates the same few large temporaries ([R, V] logits) again and again; otherwise each comes back
    as fresh pages, and the page faults cost more than the arithmetic. False where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES))
