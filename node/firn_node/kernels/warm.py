"""``python -m firn_node.kernels.warm``: compile every kernel into the cache, and say what it took.

Run at install and at image build. When all of them are in the cache already it ends within a second. It also
writes the bytecode of our packages and of every module that was loaded on the way: some installers leave it out,
and some environments forbid a process to write it. Without ours a broker starts 0.2 s later, without Numba's two.
"""

import compileall
import logging
import sys
import time
from importlib import import_module
from pathlib import Path

import firn
import firn_node

_NO_KERNELS = ("__init__", "warm", "cpu", "jit", "compiling", "machine", "inline", "checksum", "text")
_BROKER = (
    "firn.cli.main",
    "firn_node.commands",
    "firn_node.server",
    "firn_node.engine.broker",
    "firn_node.main",
)


def modules() -> list[str]:
    """The modules of this package that hold kernels."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in _NO_KERNELS)


def write_bytecode() -> None:
    """*Effects*: what a broker loads has an up-to-date ``.pyc``, where its folder can be written."""
    for name in _BROKER:
        import_module(name)
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files |= {str(path) for package in (firn, firn_node) for path in Path(package.__path__[0]).rglob("*.py")}
    for file in sorted(file for file in files if file and file.endswith(".py")):
        compileall.compile_file(file, quiet=2)


def main() -> int:
    began = time.perf_counter()
    names = modules()
    from firn_node.kernels import jit

    import_module("firn_node.kernels.compiling")
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
