"""Numbered steps of every write path, where a crash test can stop the process.

``step("append.written")`` does nothing unless the test switch is on: the environment variable
``FIRN_FAILPOINT=NAME[:N]`` kills the process (SIGKILL, no handler runs) the N-th time that step is reached, and
a test may install its own ``hook``.
"""

import os
import signal
from collections.abc import Callable

hook: Callable[[str], None] | None = None

_name, _, _count = os.environ.get("FIRN_FAILPOINT", "").partition(":")
if _name:
    _left = int(_count or 1)

    def _kill(name: str) -> None:
        global _left
        if name == _name:
            _left -= 1
            if _left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    hook = _kill


def step(name: str) -> None:
    """Mark one step of a write path; a crash between any two steps must be recoverable."""
    if hook is not None:
        hook(name)
