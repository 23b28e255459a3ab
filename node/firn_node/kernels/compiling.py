"""The half of ``jit`` that imports Numba: what compiles a kernel, or loads it from the cache.

Numba calls a cached kernel fresh while the file it stands in is unchanged; a kernel also holds the code of
the helpers that it calls, and the limits that it names, from other files. So the stamp covers what a file
imports, inside of functions too.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching
from numba.core.registry import cpu_target

from firn_node.kernels import cpu

_config: Any = numba.config
if cpu.level is not None and os.environ["NUMBA_CPU_NAME"] != _config.CPU_NAME:
    _config.reload_config()  # someone imported Numba before this package could name the CPU

log = logging.getLogger(__name__)
_njit: Any = numba.njit
FOLDER = Path(__file__).parent
_ROOT = FOLDER.parent.parent


def imported(source: str) -> set[str]:
    """The modules of firn and firn_node that a source file names in its imports."""
    found = set()
    for module, names in re.findall(r"^ *(?:from (firn[\w.]*) )?import ([\w., ]+|\()", source, re.MULTILINE):
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
        for module in sorted(imported(text)):
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
        return super().from_function(function, file) if Path(file).parent == FOLDER else None  # type: ignore[misc]


class _GivenFolder(_StampedLocator, caching.UserProvidedCacheLocator):
    """``NUMBA_CACHE_DIR``, when it is set: also when it cannot be written, as in an image, if kernels are in it."""

    def ensure_cache_path(self) -> None:
        locator: Any = super()
        try:
            locator.ensure_cache_path()
        except OSError:
            if not any(Path(locator.get_cache_path()).glob("*.nbi")):
                raise


class _PackageFolder(_StampedLocator, caching.InTreeCacheLocator):
    """``__pycache__`` beside the source, when it can be written."""


class _UserFolder(_StampedLocator, caching.UserWideCacheLocator):
    """The user's cache folder."""


caching.CacheImpl._locator_classes[:0] = [_GivenFolder, _PackageFolder, _UserFolder]


def compiled_kernel(function: Callable[..., Any], signatures: list[str]) -> tuple[Any, bool]:
    """The function for exactly these signatures; True: it was compiled, False: it came from the cache."""
    options: dict[str, Any] = {"nogil": True, "boundscheck": False}
    try:
        made: Any = _njit(signatures, cache=True, **options)(function)
        return made, bool(made.stats.cache_misses)
    except OSError:  # it was compiled, and could not be written
        return _njit(signatures, **options)(function), True
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return _njit(signatures, **options)(function), True


def compiled_helper(function: Callable[..., Any]) -> Any:
    """A function that kernels call, compiled for the types that they call it with."""
    return _njit(function)


def type_of(value: Any) -> Any:
    """What Numba takes a global of this value for."""
    context: Any = cpu_target.typing_context
    context.refresh()
    return context.resolve_value_type(value)
