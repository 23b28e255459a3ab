"""``firn compact --engine spark``: a child process, ``python -m firn_spark.force_compaction``, and its progress.

``firn`` itself stays light: it imports nothing of Spark. The child prints a JSON object a line on stderr for its progress
and one on stdout at its end; whatever else Spark says on stderr is dropped, but for the last line of a failure.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

from firn.cli.running import fail

Document = dict[str, Any]
MODULE = "firn_spark.force_compaction"
PREFIX = "firn_spark.force_compaction: "
_NEEDED = ("firn_spark", "pyspark", "pyarrow")


def missing() -> str | None:
    """The package without which Spark cannot run here; None when all are there."""
    return next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)


def check_spark() -> None:
    """*Errors*: Failure, one sentence that says what is missing."""
    if (name := missing()) is not None:
        fail(
            f"--engine spark needs {name}, which is not installed: pip install 'firn[spark]', or leave the option out"
        )


def compact_by_spark(topic: str, options: Sequence[str], show: Callable[[Document], None]) -> Document:
    """The document of the compaction, as it has ended; ``options`` of the child; ``show`` is given its progress.

    *Errors*: Failure with the child's own sentence when it has no result.
    """
    command = [sys.executable, "-m", MODULE, *options, "--progress", "--output", "json", "--", topic]
    with (  # a file: the result of many partitions is more than a pipe holds while nobody reads it
        tempfile.TemporaryFile("w+") as result,
        subprocess.Popen(command, stdout=result, stderr=subprocess.PIPE, text=True) as child,
    ):
        try:
            assert child.stderr is not None
            last = _followed(child.stderr, show)
            child.wait()
            result.seek(0)
            lines = result.read().splitlines()
        except BaseException:
            child.terminate()  # its plan stays open, and the next run goes on with it
            raise
    if lines:
        found: Document = json.loads(lines[-1])
        return found
    return fail(last or f"Spark ended with exit code {child.returncode} and said nothing")


def _followed(lines: IO[str], show: Callable[[Document], None]) -> str:
    """The sentence of a failure, if there was one; else the last line."""
    sentence = last = ""
    for line in lines:
        for text in line.replace("\r", "\n").split("\n"):  # Spark's own bar ends no line
            text = text.strip()
            if text.startswith("{") and text.endswith("}"):
                show(json.loads(text))
            elif text.startswith(PREFIX):
                sentence = text.removeprefix(PREFIX)
            elif text:
                last = text
    return sentence or last
