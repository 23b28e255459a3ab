"""Many small reads of one file in one call: for ``firn_node.disk.gather`` alone. Of the other kernels only ``single``
does I/O.

A read of a row costs the kernel of the machine half a microsecond, and Python two more.
"""

from typing import Any

from firn_node.kernels.jit import by_machine, kernel

pread = by_machine("pread")


@kernel("int64(int32, Array(int64, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), uint8[::1])")
def pread_many(fd: Any, positions: Any, sizes: Any, out: Any) -> Any:
    """How many of the ranges were read whole, one after another into ``out``; stops at the first that was not."""
    at = out.ctypes.data
    for i in range(len(positions)):
        if pread(fd, at, sizes[i], positions[i]) != sizes[i]:
            return i
        at += sizes[i]
    return len(positions)
