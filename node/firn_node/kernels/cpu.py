"""The CPU that kernels are compiled for: fixed before Numba is first imported, because Numba reads it then.

Numba's cache key holds the CPU's name and features. One of two portable levels is chosen, so that an image built
on one machine starts warm on another, and so that every import order gives the same key.
"""

import os
import platform


def _level() -> tuple[str, str] | None:
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


if (level := _level()) is not None:
    os.environ.setdefault("NUMBA_CPU_NAME", level[0])
    os.environ.setdefault("NUMBA_CPU_FEATURES", level[1])
HAS_CRC32_INSTRUCTION = level is not None and "+sse4.2" in os.environ["NUMBA_CPU_FEATURES"]
