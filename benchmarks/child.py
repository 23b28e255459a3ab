"""One measurement in its own process: ``python -m benchmarks.child MODULE:NAME JSON`` prints the result as JSON."""

import asyncio
import importlib
import inspect
import json
import sys


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    result = function(**json.loads(sys.argv[2]))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
