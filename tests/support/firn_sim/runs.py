"""Many seeds, one or two processes: how ``make simulate`` and the tests run the simulation."""

import concurrent.futures
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count, islice
from typing import Any

from firn_sim.checkers import Counts
from firn_sim.faults import draw_failovers, draw_profile
from firn_sim.firnlog import FirnLog
from firn_sim.group import simulate
from firn_sim.rebuild.group import RebuildCounts, simulate_rebuild
from firn_sim.replicalog import ReplicaLog

CHUNK = 8
FIRN_LOG_EVERY = 4  # every fourth seed runs the broker's own commit log
MIXTURES = {"all": draw_profile, "failovers": draw_failovers}  # of faults
REBUILD = "rebuild"  # not the group: one of its standbys

Reached = Counts | RebuildCounts
Outcome = tuple[int, Reached | None, str]  # the seed, what it reached, the story of its failure


@dataclass(slots=True)
class Tally:
    seeds: int = 0
    seconds: float = 0.0
    counts: Any = field(default_factory=Counts)
    failures: list[tuple[int, str]] = field(default_factory=list)  # seed, story

    def add(self, seed: int, counts: Reached | None, story: str) -> None:
        self.seeds += 1
        if counts is None:
            self.failures.append((seed, story))
            return
        for each in fields(counts):
            total = getattr(self.counts, each.name) + getattr(counts, each.name)
            setattr(self.counts, each.name, total)

    def summary(self) -> str:
        """Lines for people."""
        rate = self.seeds / max(self.seconds, 1e-9) * 60
        reached = ", ".join(
            f"{getattr(self.counts, each.name)} {each.name.replace('_', ' ')}" for each in fields(self.counts)
        )
        return (
            f"{self.seeds} seeds in {self.seconds:.1f} s, {rate:.0f} seeds/min, "
            f"{len(self.failures)} failed\nreached: {reached}"
        )


def run_seed(seed: int, mixture: str = "all") -> Outcome:
    """One run, its failure as text: replayed by ``replay_command``."""
    try:
        if mixture == REBUILD:
            return seed, simulate_rebuild(seed), ""
        make_log = FirnLog if seed % FIRN_LOG_EVERY == 0 else ReplicaLog
        return seed, simulate(seed, draw=MIXTURES[mixture], make_log=make_log), ""
    except Exception as error:  # the boundary of a run: whatever it is, the seed goes with it
        notes = "\n".join(getattr(error, "__notes__", ()))
        replay = replay_command(seed, mixture)
        return seed, None, f"{type(error).__name__}: {error}\n{notes}\nreplay: {replay}"


def replay_command(seed: int, mixture: str) -> str:
    return f"make simulate SEED={seed}" + (f" FAULTS={mixture}" if mixture != "all" else "")


def _tally(mixture: str) -> Tally:
    return Tally(counts=RebuildCounts() if mixture == REBUILD else Counts())


def run_seeds(first: int, seeds: int, jobs: int, mixture: str = "all") -> Tally:
    """``seeds`` runs from ``first`` on; stops asking for more after the first failure."""
    tally, began = _tally(mixture), time.monotonic()
    for outcome in _outcomes(islice(count(first), seeds), jobs, mixture):
        tally.add(*outcome)
        if tally.failures:
            break
    tally.seconds = time.monotonic() - began
    return tally


def _outcomes(seeds: Iterator[int], jobs: int, mixture: str) -> Iterator[Outcome]:
    run = partial(run_seed, mixture=mixture)
    if jobs == 1:
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        while chunk := list(islice(seeds, CHUNK * jobs)):
            yield from pool.map(run, chunk)


def run_for(seconds: float, first: int, mixture: str = "all") -> Tally:
    """As many runs as begin within so many seconds."""
    tally, began = _tally(mixture), time.monotonic()
    for seed in count(first):
        tally.add(*run_seed(seed, mixture))
        tally.seconds = time.monotonic() - began
        if tally.failures or tally.seconds >= seconds:
            return tally
    raise AssertionError("unreachable: count() does not end")
