"""``python -m firn_model``: TLC over the model of the replication rules, every run or those named.

Exit status: 0 every run ended as expected, 1 one did not, or TLC could not be had.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from firn_model import page
from firn_model.jar import NoTlc, fetch_jar
from firn_model.runs import QUICK, RUNS, Run
from firn_model.tlc import Found, Machine, execute


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="firn_model", description=__doc__)
    parser.add_argument("names", nargs="*", help="runs; all without a name")
    parser.add_argument("--quick", action="store_true", help="the small ones")
    parser.add_argument("--write", action="store_true", help="put the results into docs/replication.md")
    parser.add_argument("--out", type=Path, help="folder for TLC's words, traces included")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--heap", default="4g")
    parser.add_argument("--limit", type=int, default=900, help="seconds for a run that must end")
    parser.add_argument("--search-seconds", type=int, default=120, help="for a run that sees what it can")
    parser.add_argument("--walks", type=int, default=20_000, help="random walks of each run that walks")
    parser.add_argument("--cache", type=Path, default=Path("build/model"), help="where TLC's jar is kept")
    options = parser.parse_args(arguments)
    names = [name for text in options.names for name in text.split(",")]
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        parser.error(f"unknown runs: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    names = names or list(QUICK if options.quick else RUNS)
    try:
        jar = fetch_jar(options.cache)
    except NoTlc as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    machine = Machine(
        jar, options.workers, options.heap, options.limit, options.search_seconds, options.walks
    )
    results = []
    for name in names:
        found = execute(RUNS[name], machine)
        results.append((RUNS[name], found))
        _tell(RUNS[name], found, options.out)
    if options.write:
        page.write(results)
    failed = [run.name for run, found in results if not found.is_as_expected(run)]
    if failed:
        print(f"model: not as expected: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _tell(run: Run, found: Found, out: Path | None) -> None:
    verdict = "ok  " if found.is_as_expected(run) else "FAIL"
    ended = found.violated or ("holds" if found.is_whole else "no violation seen")
    print(
        f"{verdict} {run.name:18} {ended:18} steps {found.steps:3}  distinct {found.distinct:>9,}  "
        f"generated {found.generated:>11,}  {found.seconds:6.1f} s",
        flush=True,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{run.name}.txt").write_text(found.output)


if __name__ == "__main__":
    sys.exit(main())
