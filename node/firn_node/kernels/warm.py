"""``python -m firn_node.kernels.warm``: compile every kernel into the cache, and say what it took.

Run at install and at image build. When all of them are in the cache already it ends within a second. It also
writes the bytecode of every module that was loaded on the way: some installers leave it out, and Numba is big
enough that a process without it spends two seconds on compiling Python.
"""

import compileall
import logging
import sys
import time
from importlib import import_module
from pathlib import Path

_NO_KERNELS = ("__init__", "warm", "cpu", "jit", "inline", "checksum", "text")


def modules() -> list[str]:
    """The modules of this package that hold kernels."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in _NO_KERNELS)


def write_bytecode() -> None:
    """*Effects*: loaded modules have an up-to-date ``.pyc``, where their folder can be written."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for file in sorted(file for file in files if file and file.endswith(".py")):
        compileall.compile_file(file, quiet=2)


def main() -> int:
    began = time.perf_counter()
    names = modules()
    from firn_node.kernels import jit

    jit.log.setLevel(logging.ERROR)
    print(f"numba loaded in {time.perf_counter() - began:.2f} s", flush=True)
    for i, name in enumerate(names, 1):
        import_module(f"firn_node.kernels.{name}")
        jit.load_all()
        while len(jit.loaded) > 0:
            ready = jit.loaded.pop(0)
            how = "compiled" if ready.is_compiled else "from the cache"
            print(f"[{i}/{len(names)}] {name}.{ready.name}: {how}, {ready.seconds:.3f} s", flush=True)
    write_bytecode()
    print(f"all kernels are ready, {time.perf_counter() - began:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
