"""``python -m firn_sim``: runs of the simulated group, as many as asked for, or one seed again."""

import argparse
import os
import sys
import time

from firn_sim.mutations import MUTATIONS, REBUILD_MUTATIONS, SEEDS, find
from firn_sim.runs import MIXTURES, REBUILD, run_seed, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="firn_sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many runs")
    parser.add_argument("--first", type=int, help="the first seed; by default a new one each time")
    parser.add_argument("--seed", type=int, help="replay one")
    parser.add_argument(
        "--faults",
        choices=(*MIXTURES, REBUILD),
        default="all",
        help="every kind, or one failover after the other; or the rebuild of a standby",
    )
    parser.add_argument("--mutations", action="store_true", help="the table of docs/replication.md")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args()
    if args.mutations:
        return print_mutations()
    if args.seed is not None:
        _, counts, story = run_seed(args.seed, args.faults)
        print(story or f"seed {args.seed}: every invariant holds\n{counts}")
        return 1 if story else 0
    first = args.first if args.first is not None else time.time_ns() // 1_000_000 % 10**10 * 1000
    tally = run_seeds(first, args.seeds, args.jobs, args.faults)
    print(f"seeds from {first}: {tally.summary()}")
    for _, story in tally.failures:
        print(story)
    return 1 if tally.failures else 0


def print_mutations() -> int:
    """A row for each clause left out; 1 when one was not found out."""
    print("| rule | dropped | so that | violated | seeds |\n|---|---|---|---|---|")
    is_missed = False
    for mutation in (*MUTATIONS, *REBUILD_MUTATIONS):
        found = find(mutation, SEEDS)
        is_missed = is_missed or found is None
        seeds, name = (found[0], found[1].name) if found is not None else (f"over {SEEDS}", "nothing")
        print(f"| {mutation.rule} | `{mutation.name}` | {mutation.dropped} | {name} | {seeds} |", flush=True)
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
