"""The one decorator of every kernel: it is loaded, or compiled, when it is first called.

A kernel is compiled once a machine (``python -m firn_node.kernels.warm``, run at install and at image build)
and loaded from the cache afterwards, on any machine of the same CPU level (``cpu``). When the cache is cold, or
cannot be written, a process compiles in memory and says so in its log.

Numba is imported with the first kernel that is loaded (``compiling``), never before: with what it sets up for the
first one it takes half a second, and a broker that was stopped cleanly starts without a kernel. So kernels name
what they call by ``Callee``, which is made when a kernel is compiled.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel that is ready to be called."""

    name: str
    seconds: float
    is_compiled: bool  # False: it came from the cache


loaded: list[Loaded] = []


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


def load_all(is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Load every kernel of the modules that are imported, for as long as they are wanted; whether all were."""
    for kernel in list(kernels):
        if not is_wanted():
            return False
        kernel.load()
    return True


def prepare() -> None:
    """Import Numba and let it set itself up, half a second: ahead of work that must not wait for it."""
    kernels[0].load()


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
    from firn_node.kernels import compiling

    compiled, is_compiled = compiling.compiled_kernel(function, signatures)
    found = Loaded(function.__name__, time.perf_counter() - began, is_compiled)
    if is_compiled:
        log.warning(
            "compiled the kernel %s in %.1f s; `python -m firn_node.kernels.warm` does it ahead",
            found.name, found.seconds,
        )  # fmt: skip
    loaded.append(found)
    return compiled


class Callee:
    """What kernels call, made when Numba first asks for its type, which is when it compiles such a kernel."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def made(self) -> Any:
        return self._make()

    @cached_property
    def _numba_type_(self) -> Any:
        """Numba's protocol for globals of any class."""
        from firn_node.kernels import compiling

        return compiling.type_of(self.made)

    def __call__(self, *args: Any) -> Any:
        return self.made(*args)


def helper(function: F) -> F:
    """A function that kernels call; it is compiled into each of them."""

    def make() -> Any:
        from firn_node.kernels import compiling

        return compiling.compiled_helper(function)

    return cast(F, Callee(make))


def by_machine(name: str) -> Any:
    """One of ``firn_node.kernels.machine``, for kernels to call."""

    def make() -> Any:
        from firn_node.kernels import machine

        return getattr(machine, name)

    return Callee(make)


def aligned(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """``array`` itself, or a copy that a signature with aligned, contiguous arrays accepts."""
    if array.dtype == dtype and array.flags.aligned and array.flags.c_contiguous:
        return array
    return np.require(array, dtype, ["C", "A"])
