"""The source root ``operator/`` has the name of a module of the standard library and must never stand in for it."""

import subprocess
import sys
from pathlib import Path

import firn_operator

ROOT = Path(firn_operator.__file__).parents[1]


def test_the_operators_source_root_does_not_shadow_the_standard_module() -> None:
    code = "import operator; print(operator.__file__); assert operator.add(1, 2) == 3"
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); {code}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert str(ROOT) not in shown
    assert not (ROOT / "__init__.py").exists()
