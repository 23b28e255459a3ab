"""What kernels call that no Python can say: unaligned loads and stores, the CRC-32C instruction,
arrays by their addresses, ``pread``.

Imports Numba, so it is named by ``jit.by_machine`` alone. None of it checks bounds: the kernel that calls has to.
"""

from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import numpy_support

_intrinsic: Any = intrinsic


def _loader(bits: int, result: Any) -> Any:
    """An intrinsic that loads ``bits`` bits, little-endian, at a byte index of a ``uint8`` array."""

    def load(typingctx: Any, data: Any, at: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            pointer = builder.gep(array.data, [args[1]])
            word = builder.bitcast(pointer, ir.IntType(bits).as_pointer())
            return builder.load(word, align=1)

        return result(data, types.intp), codegen

    return _intrinsic(load)


load_u16 = _loader(16, types.uint16)
load_u32 = _loader(32, types.uint32)
load_i32 = _loader(32, types.int32)
load_u64 = _loader(64, types.uint64)
load_i64 = _loader(64, types.int64)


def _storer(bits: int, kind: Any) -> Any:
    """An intrinsic that stores ``bits`` bits, little-endian, at a byte index of a writable ``uint8``
    array."""

    def store(typingctx: Any, data: Any, at: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            pointer = builder.gep(array.data, [args[1]])
            builder.store(args[2], builder.bitcast(pointer, ir.IntType(bits).as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(data, types.intp, kind), codegen

    return _intrinsic(store)


store_u32 = _storer(32, types.uint32)
store_i64 = _storer(64, types.int64)


def _crc_of_u64(typingctx: Any, crc: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i64 = ir.IntType(64)
        function = cast(Any, cgutils).get_or_insert_function(
            builder.module, ir.FunctionType(i64, [i64, i64]), "llvm.x86.sse42.crc32.64.64"
        )
        return builder.call(function, args)

    return types.uint64(types.uint64, types.uint64), codegen


crc_of_u64 = _intrinsic(_crc_of_u64)  # the sum after 8 more bytes

# ssize_t pread(int, void *, size_t, off_t); the pointer goes as a number.
pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.uint64, types.int64))


def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), codegen


pointer_to = _intrinsic(_pointer)  # of an address: whoever gives it keeps alive what lies there
carray: Any = numpy_support.carray  # an array of a shape that lies at a pointer
