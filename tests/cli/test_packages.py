"""What the layout promises: import layers hold, and no package of ours shadows one of Python's."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_operator_module_of_python_is_not_shadowed() -> None:
    found = subprocess.run(
        [sys.executable, "-S", "-c", "import operator; print(operator.__file__); operator.itemgetter(0)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(ROOT) not in found.stdout
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "tests" / "operator").exists()


def test_there_is_no_package_file_under_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_light_package_loads_none_of_the_brokers_libraries() -> None:
    code = (
        "import sys, pkgutil, importlib, firn\n"
        "for m in pkgutil.walk_packages(firn.__path__, 'firn.'):\n"
        "    importlib.import_module(m.name)\n"
        "bad = {'firn_node', 'numba', 'rocksdict', 'pandas', 'pyarrow', 'prometheus_client'}\n"
        "print(sorted(bad & {name.split('.')[0] for name in sys.modules}))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_waits_for_neither_the_network_library_nor_the_compiler() -> None:
    code = (
        "import sys\n"
        "from firn.cli.main import build\n"
        "build()\n"
        "bad = {'aiohttp', 'numba', 'rocksdict', 'pandas', 'rich.table'}\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_no_file_of_the_project_names_a_folder_of_one_machine() -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = ["/" + name + "/" for name in ("work", "root", "home")]
    for name in names:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ""} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="ignore")
            assert not [folder for folder in folders if folder in text], name
