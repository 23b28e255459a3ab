"""One measurement in a process of its own, forked from a server that has imported the clients and done nothing else.

So no measurement inherits another's memory, threads or warm caches, and none pays for imports.
"""

import asyncio
import importlib
import inspect
import traceback
from multiprocessing.connection import Connection
from typing import Any


def answer(to: "Connection[Any]", function: str, arguments: dict[str, Any]) -> None:
    """Send (result, None) of ``MODULE:NAME`` of this folder, or (None, what went wrong)."""
    try:
        to.send((_run(function, arguments), None))
    except Exception:  # the boundary of this process: whoever waits for it learns what happened
        to.send((None, traceback.format_exc()))


def _run(function: str, arguments: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result
