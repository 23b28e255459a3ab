"""``python -m firn_spark NAME ARGUMENTS...``: the jobs by their names; ``script``: the file for spark-submit."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

JOBS = {
    "force_compaction": "compact a topic by the real bytes of its keys",
    "snapshot": "a topic's map as Parquet files",
    "load": "Parquet files into a topic",
    "audit": "compare the compacted view with a map made anew from the raw view",
    "erase": "delete every key that a SQL condition finds",
    "copy": "a topic into another one, with other partitions or other keys",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the job that the first argument names."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name == "script":
        print(Path(__file__).parent / "script" / "firn_job.py")
        return 0
    if name in ("-h", "--help"):
        print("usage: python -m firn_spark NAME ARGUMENTS..., NAME one of")
        for job, summary in JOBS.items():
            print(f"  {job:<18}{summary}")
        print("  script            where the file for spark-submit is")
        return 0
    if name not in JOBS:
        print(f"firn_spark: no job is called {name!r}; there are {', '.join(JOBS)}", file=sys.stderr)
        return 2
    return int(import_module(f"firn_spark.{name}").main(rest))


def run_by_name(name: str) -> int:
    """For ``python -m firn_spark.NAME``: run the job as the module that it is, not as ``__main__``.

    Functions and classes of ``__main__`` would travel to the executors by value, a copy of each with every task.
    """
    return main([name, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
