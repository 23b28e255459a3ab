"""The one decorator of every kernel, and the settings that make its compiled code cacheable.

A kernel is compiled once a machine (``python -m firn_node.kernels.warm``, run at install and at image build)
and loaded from the cache afterwards, on any machine of the same CPU level (``cpu``). When the cache is cold, or
cannot be written, a process compiles in memory and says so in its log.

Numba calls a cached kernel fresh while the file it stands in is unchanged; a kernel also holds the code of
the helpers that it calls, and the limits that it names, from other files. So the stamp covers what a file
imports.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import caching
from numpy.typing import NDArray

from firn_node.kernels import cpu

_config: Any = numba.config
if cpu.level is not None and os.environ["NUMBA_CPU_NAME"] != _config.CPU_NAME:
    _config.reload_config()  # someone imported Numba before this package could name the CPU

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)
_njit: Any = numba.njit
_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parent.parent


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel that is ready to be called."""

    name: str
    seconds: float
    is_compiled: bool  # False: it came from the cache


loaded: list[Loaded] = []


def _imported(source: str) -> set[str]:
    """The modules of firn and firn_node that a source file names in its imports."""
    found = set()
    for module, names in re.findall(r"^(?:from (firn[\w.]*) )?import ([\w., ]+|\()", source, re.MULTILINE):
        if module:
            found |= {module, *(f"{module}.{name.strip()}" for name in names.split(","))}
    return found


@cache
def _stamp(path: Path) -> bytes:
    """A digest of a source file and of all our files that it imports, directly or not."""
    digest, todo, seen = hashlib.sha256(numba.__version__.encode()), [path], {path}
    while todo:
        text = todo.pop().read_text()
        digest.update(text.encode())
        for module in sorted(_imported(text)):
            file = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
            if file not in seen and file.is_file():
                seen.add(file)
                todo.append(file)
    return digest.digest()


class _StampedLocator:
    """What the two locators below change: the stamp, and that they hold for this package alone."""

    _py_file: str

    def get_source_stamp(self) -> bytes:
        return _stamp(Path(self._py_file))

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        return super().from_function(function, file) if Path(file).parent == _FOLDER else None  # type: ignore[misc]


class _GivenFolder(_StampedLocator, caching.UserProvidedCacheLocator):
    """``NUMBA_CACHE_DIR``, when it is set."""


class _PackageFolder(_StampedLocator, caching.InTreeCacheLocator):
    """``__pycache__`` beside the source, when it can be written."""


class _UserFolder(_StampedLocator, caching.UserWideCacheLocator):
    """The user's cache folder."""


caching.CacheImpl._locator_classes[:0] = [_GivenFolder, _PackageFolder, _UserFolder]


def kernel(*signatures: str) -> Callable[[F], F]:
    """Compile for exactly these signatures, without the GIL, cached on disk.

    Read-only and writable arrays are different types: name ``Array(uint8, 1, 'C', readonly=True)`` for views
    of received bytes; it takes writable ones too.
    """

    def wrap(function: F) -> F:
        began = time.perf_counter()
        options: dict[str, Any] = {"nogil": True, "boundscheck": False}
        try:
            compiled: Any = _njit(list(signatures), cache=True, **options)(function)
            is_compiled = bool(compiled.stats.cache_misses)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            compiled, is_compiled = _njit(list(signatures), **options)(function), True
        found = Loaded(function.__name__, time.perf_counter() - began, is_compiled)
        if is_compiled:
            log.warning(
                "compiled the kernel %s in %.1f s; `python -m firn_node.kernels.warm` does it ahead",
                found.name, found.seconds,
            )  # fmt: skip
        loaded.append(found)
        return cast(F, compiled)

    return wrap


def helper(function: F) -> F:
    """A function that kernels call; it is compiled into each of them."""
    return cast(F, _njit(function))


def aligned(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """``array`` itself, or a copy that a signature with aligned, contiguous arrays accepts."""
    if array.dtype == dtype and array.flags.aligned and array.flags.c_contiguous:
        return array
    return np.require(array, dtype, ["C", "A"])
