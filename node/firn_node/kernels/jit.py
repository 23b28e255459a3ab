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
import threading
import time
from collections.abc import Callable, Sequence
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


class Kernel:
    """A kernel that is loaded when it is first called: a start pays for what it uses alone."""

    __slots__ = ("_compiled", "_function", "_lock", "_signatures")

    def __init__(self, function: Callable[..., Any], signatures: Sequence[str]) -> None:
        self._function = function
        self._signatures = list(signatures)
        self._compiled: Any = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        compiled = self._compiled
        return (compiled if compiled is not None else self.load())(*args)

    def load(self) -> Any:
        """The compiled function, from the cache or compiled now."""
        with self._lock:
            if self._compiled is None:
                self._compiled = _compiled(self._function, self._signatures)
            return self._compiled


kernels: list[Kernel] = []


def load_all() -> None:
    """Load every kernel of the modules that are imported."""
    for kernel in list(kernels):
        kernel.load()


def kernel(*signatures: str) -> Callable[[F], F]:
    """Compile for exactly these signatures, without the GIL, cached on disk; loaded at the first call.

    Read-only and writable arrays are different types: name ``Array(uint8, 1, 'C', readonly=True)`` for views
    of received bytes; it takes writable ones too.
    """

    def wrap(function: F) -> F:
        made = Kernel(function, signatures)
        kernels.append(made)
        return cast(F, made)

    return wrap


def _compiled(function: Callable[..., Any], signatures: list[str]) -> Any:
    began = time.perf_counter()
    options: dict[str, Any] = {"nogil": True, "boundscheck": False}
    try:
        compiled: Any = _njit(signatures, cache=True, **options)(function)
        is_compiled = bool(compiled.stats.cache_misses)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        compiled, is_compiled = _njit(signatures, **options)(function), True
    found = Loaded(function.__name__, time.perf_counter() - began, is_compiled)
    if is_compiled:
        log.warning(
            "compiled the kernel %s in %.1f s; `python -m firn_node.kernels.warm` does it ahead",
            found.name, found.seconds,
        )  # fmt: skip
    loaded.append(found)
    return compiled


def helper(function: F) -> F:
    """A function that kernels call; it is compiled into each of them."""
    return cast(F, _njit(function))


def aligned(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """``array`` itself, or a copy that a signature with aligned, contiguous arrays accepts."""
    if array.dtype == dtype and array.flags.aligned and array.flags.c_contiguous:
        return array
    return np.require(array, dtype, ["C", "A"])
