"""What a test's run of the command line looks like."""

import subprocess
from collections.abc import Callable

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
