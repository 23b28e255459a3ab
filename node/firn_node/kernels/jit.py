"""The one decorator of every kernel, and the settings that make its compiled code cacheable.

A kernel is compiled once a machine (``python -m firn_node.kernels.warm``, run at install and at image build)
and loaded from the cache afterwards. Numba's cache key holds the CPU's name and features, so both are fixed here
to one of two portable levels before Numba is imported: an image built on one machine starts warm on another.
When the cache is cold, or cannot be written, a process compiles in memory and says so in its log.
"""

import os
import platform
from collections.abc import Callable
from typing import Any, TypeVar, cast


def _cpu_level() -> tuple[str, str] | None:
    """The name and features that Numba compiles for; None leaves them to Numba (not x86-64)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = set(next((line for line in file if line.startswith("flags")), "").split())
    except OSError:
        flags = set()
    if {"avx2", "bmi2", "fma", "sse4_2"} <= flags:
        return "x86-64-v3", "+avx2,+bmi,+bmi2,+fma,+sse4.2,+popcnt,+lzcnt"
    return "x86-64-v2", "+sse4.2,+popcnt"


if (_level := _cpu_level()) is not None:
    os.environ.setdefault("NUMBA_CPU_NAME", _level[0])
    os.environ.setdefault("NUMBA_CPU_FEATURES", _level[1])

HAS_SSE42 = _level is not None

import numba  # noqa: E402 - the environment above must be set first
import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

F = TypeVar("F", bound=Callable[..., Any])


def kernel(*signatures: str) -> Callable[[F], F]:
    """Compile for exactly these signatures, without the GIL, cached on disk.

    Read-only and writable arrays are different types: name ``Array(uint8, 1, 'C', readonly=True)`` for views
    of received bytes; it takes writable ones too.
    """

    def wrap(function: F) -> F:
        return cast(F, numba.njit(list(signatures), nogil=True, cache=True, boundscheck=False)(function))

    return wrap


def aligned(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """``array`` itself, or a copy that a signature with aligned, contiguous arrays accepts."""
    if array.dtype == dtype and array.flags.aligned and array.flags.c_contiguous:
        return array
    return np.require(array, dtype, ["C", "A"])
