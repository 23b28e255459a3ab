"""Give freed memory back to the machine: glibc keeps it by default, and a broker's arrays come and go by megabytes.

glibc raises its threshold for ``mmap`` with every large block that is freed, up to 32 MiB; from then on such blocks
come from heaps that only shrink from their ends. A load of 50 M records left 1.2 GB resident that nobody used. So
the threshold is fixed (blocks above it are returned at once, smaller ones are reused), the number of heaps is
bounded, and ``trim`` returns what lies idle in them. Elsewhere than on glibc all of it does nothing.
"""

import ctypes
import functools
from typing import Any

MMAP_BYTES = 1 << 20  # larger blocks are mapped and unmapped one by one
ARENAS_MAX = 2  # heaps; threads share them, allocation is rare where it is parallel

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


@functools.cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
    except OSError:
        return None


def bound_heaps() -> None:
    """Fix the allocator's thresholds; to be called once, before threads start."""
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 * MMAP_BYTES)
        libc.mallopt(_M_ARENA_MAX, ARENAS_MAX)


def trim() -> None:
    """Return idle memory to the machine; takes milliseconds, without the GIL."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
