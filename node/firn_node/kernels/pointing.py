"""Arrays that a kernel reaches by their addresses: as many as there are, in one call."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), codegen


_made: Any = intrinsic
pointer_to = _made(_pointer)  # of an address: whoever gives it keeps alive what lies there
