"""Compiled kernels are found again by other processes, whatever they imported first."""

import subprocess
import sys

import pytest

import firn_node.kernels.group  # noqa: F401
from firn_node.kernels import jit

jit.load_all()  # in the cache from here on

SHOW = (
    "from firn_node.kernels import group, jit; jit.load_all();"
    "print(len(jit.loaded) > 0, [k.name for k in jit.loaded if k.is_compiled])"
)


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("first", ["import numba", "import firn_node.kernels.checksum", "import firn"])
def test_a_process_loads_what_another_compiled_whatever_it_imports_first(first: str) -> None:
    assert run("-c", f"{first}; {SHOW}").strip() == "True []"


def test_the_stamp_of_a_kernel_covers_the_files_that_it_is_compiled_from() -> None:
    from firn_node.kernels import compiling

    source = (compiling.FOLDER / "walking.py").read_text()
    named = {"firn.limits", "firn.batch", "firn_node.kernels.inline", "firn_node.kernels.checksum"}
    assert named <= compiling.imported(source)


def test_the_stamp_of_a_kernel_covers_what_is_imported_inside_of_functions() -> None:
    from firn_node.kernels import compiling

    source = (compiling.FOLDER / "jit.py").read_text()
    assert "firn_node.kernels.machine" in compiling.imported(source)


def test_a_broker_is_made_without_loading_numba() -> None:
    made = (
        "import firn_node.engine.broker, firn_node.server, firn_node.main, sys; print('numba' in sys.modules)"
    )
    assert run("-c", made).strip() == "False"


def test_a_warmed_cache_compiles_nothing_and_says_so() -> None:
    run("-m", "firn_node.kernels.warm")
    lines = run("-m", "firn_node.kernels.warm").splitlines()
    assert lines[-1].startswith("all kernels are ready")
    assert any("inspect: from the cache" in line for line in lines)
    assert not [line for line in lines if "compiled" in line]
