"""``python -m firn_operator run|plan``."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from firn.errors import FirnError
from firn_operator.running import run, settings_from, show_plan


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="firn-operator", description="Keeps firn's clusters and topics as they are wished."
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "plan"),
        default="run",
        help="plan: print what would be done, and do nothing",
    )
    parser.add_argument("--namespaces", default="", help="comma separated; none: all")
    parser.add_argument("--port", type=int, default=8080, help="of /livez, /readyz and /metrics")
    parser.add_argument(
        "--lease", default="firn-operator", help="name of the Lease of the operator that leads"
    )
    given = parser.parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=os.environ.get("FIRN_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    logging.getLogger("kopf").setLevel(logging.WARNING)
    settings = settings_from(given.namespaces, given.port, given.lease)
    try:
        if given.command == "plan":
            print("\n".join(asyncio.run(show_plan(settings))))
        else:
            asyncio.run(run(settings))
    except FirnError as error:
        print(f"firn-operator: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
