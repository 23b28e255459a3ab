"""Give freed memory back to the machine: glibc keeps it by default, and a broker's arrays come and go by megabytes.

glibc raises its threshold for ``mmap`` with every large block that is freed, up to 32 MiB; from then on such blocks
come from heaps that only shrink from their ends. A load of 50 M records left 1.2 GB resident that nobody used. So
the threshold is fixed (blocks above it are returned at once, smaller ones are reused), the number of heaps is
bounded, and ``trim`` returns what lies idle in them. Elsewhere than on glibc all of it does nothing.

LLVM is 150 MB of code and tables, needed to load kernels and never again: ``release_compiler`` gives up the pages.
"""

import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Larger blocks are mapped and unmapped one by one, which costs a page fault for each 4 KiB. A produce request of
# 1 MiB and its head stay below: of bulk produce they were a seventh of the broker's CPU.
MMAP_BYTES = (1 << 20) + (64 << 10)
TRIM_BYTES = 16 << 20  # kept at a heap's end: as much as lies unsynced, twice
ARENAS_MAX = 2  # heaps; threads share them, allocation is rare where it is parallel

_COMPILER = "libllvmlite"
_MADV_DONTNEED = 4

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
        libc.mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
        libc.mallopt(_M_ARENA_MAX, ARENAS_MAX)


def trim() -> None:
    """Return idle memory to the machine; takes milliseconds, without the GIL."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def release_compiler() -> None:
    """Give up the resident pages of LLVM's library; to be called when the kernels are loaded.

    Pages that were never written to alone: should they be asked for once more, they come from the file.
    """
    libc = _libc()
    if libc is None:
        return
    for start, size in unwritten(Path("/proc/self/smaps"), _COMPILER):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def unwritten(smaps: Path, library: str) -> Iterator[tuple[int, int]]:
    """(start, size) of the read-only mappings of a library that hold no page of the process's own."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return
    found: tuple[int, int] | None = None
    for line in lines:
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line):
            start, end = int(match[1], 16), int(match[2], 16)
            found = (start, end - start) if library in line and "w" not in match[3] else None
        elif found is not None and line.startswith("Anonymous:") and int(line.split()[1]) == 0:
            yield found
