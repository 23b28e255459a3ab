"""One drill from its start to its result."""

import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from firn.client import Client
from firn.errors import FirnError
from firn_node.drills.check import check
from firn_node.drills.history import End, row_of
from firn_node.drills.links import Links
from firn_node.drills.load import HOT_KEYS, KEYS, TOPIC, Load
from firn_node.drills.processes import Cluster, environment_of
from firn_node.drills.stage import SETTLE_S, Never, Stage

_WARM_S = 1.5  # load before the first fault
_AFTER_S = 1.0  # load after all is well again
# Small files and frequent checkpoints: a short drill crosses every kind of boundary.
_OPTIONS = ("--log-segment-bytes", "1Mi", "--checkpoint-bytes", "512Ki", "--compaction-check", "200ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a drill passes with, beside a clean check. ``gap_s``: given ``leaseTtl``; None: unbounded.

    ``has_failed_writes``: clients may be told that a write has failed, or that nobody knows.
    """

    gap_s: Callable[[float], float] | None = None
    healthy_s: float = 60.0
    elections_max: int | None = None
    elections_min: int = 0
    has_failed_writes: bool = True

    def sentence(self, ttl_s: float) -> str:
        parts = [] if self.gap_s is None else [f"gap <= {self.gap_s(ttl_s):g} s"]
        if self.elections_max == 0:
            parts.append("no election")
        elif self.elections_max is not None:
            parts.append(f"at most {self.elections_max} elections")
        elif self.elections_min:
            parts.append("another master")
        if not self.has_failed_writes:
            parts.append("no write fails")
        return ", ".join([*parts, f"healthy in {self.healthy_s:g} s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """``story``: what goes wrong, from the moment on when all is well under load until the faults are to end."""

    name: str
    sentence: str
    story: Callable[[Stage], Awaitable[None]]
    bounds: Bounds
    nodes: int = 3
    min_in_sync: int = 2
    may_lose_folders: bool = False
    needs_release: bool = False  # another one than this, which all replicas run at first
    number: str = ""  # in the list of drills that the project keeps


@dataclass(slots=True)
class Result:
    drill: str
    seed: int
    seconds: float = 0.0
    acknowledged: int = 0
    unknown: int = 0
    failed_writes: int = 0
    read: int = 0
    elections: int = 0
    gap_s: float | None = None
    lost: int = 0
    duplicates: int = 0
    healthy_s: float | None = None
    why: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    folder: str | None = None  # kept when the drill failed

    @property
    def passed(self) -> bool:
        return not self.why

    def document(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    ttl_s: float = 3.0
    seconds: float = 15.0
    holds_times: bool = True  # a test on a busy machine asks for right answers, not for quick ones
    data: Path | None = None  # an empty folder; else a temporary one
    release: str | None = None  # where another release is imported from, for a drill that needs one
    say: Callable[[str], None] = lambda line: None


async def run_drill(drill: Drill, seed: int, settings: Settings) -> Result:
    """Run one drill. *Effects*: its folder is removed when it passed, and was a temporary one."""
    result = Result(drill.name, seed)
    began = asyncio.get_running_loop().time()
    folder = settings.data or Path(tempfile.mkdtemp(prefix=f"firn-drill-{drill.name}-"))
    folder.mkdir(exist_ok=True)
    try:
        async with _staged(drill, seed, settings, folder, began) as stage:
            try:
                await _play(drill, stage, result, settings)
            finally:
                result.events = stage.events
    except (Never, FirnError) as error:
        result.why.append(str(error))
    result.seconds = round(asyncio.get_running_loop().time() - began, 1)
    if settings.data is None and result.passed:
        shutil.rmtree(folder)
    else:
        result.folder = str(folder)
    return result


@contextlib.asynccontextmanager
async def _staged(
    drill: Drill, seed: int, settings: Settings, folder: Path, began: float
) -> AsyncIterator[Stage]:
    """A cluster that is well, under load; nothing of it is left at the end."""
    chance = random.Random(seed)
    options = [*_OPTIONS, "--lease-ttl", f"{round(settings.ttl_s * 1000)}ms"]

    def say(event: str) -> None:
        settings.say(f"{asyncio.get_running_loop().time() - began:6.1f} s  {event}")

    release = settings.release if drill.needs_release else None
    async with Cluster(folder, drill.nodes, options, release=release) as cluster:
        links = Links([node.port for node in cluster.nodes], random.Random(chance.random()))
        async with links:
            load = Load(cluster.addresses, random.Random(chance.random()))
            stage = Stage(
                cluster, links, load, chance, settings.ttl_s, settings.seconds, drill.may_lose_folders, release, say
            )  # fmt: skip
            await cluster.start(links)
            await stage.until_healthy()
            await Load.create_topic(cluster.addresses, min_in_sync=drill.min_in_sync)
            load.start()
            try:
                await stage.until_writes(100)
                await asyncio.sleep(_WARM_S)
                yield stage
            finally:
                await load.abort()


async def _play(drill: Drill, stage: Stage, result: Result, settings: Settings) -> None:
    """The faults, the healing, the check."""
    load, epoch = stage.load, await stage.cluster.epoch()
    began = stage.now()
    stage.note("the faults begin")
    await drill.story(stage)
    await stage.heal()
    stage.note("the faults have ended")
    healed = stage.now()
    await stage.until_healthy()
    await stage.until_writes()
    result.healthy_s = round(stage.now() - healed, 2)
    stage.note("all is well")
    await asyncio.sleep(_AFTER_S)
    result.gap_s = round(load.gap(began, stage.now()), 2)
    result.elections = await stage.cluster.epoch() - epoch
    async with asyncio.timeout(SETTLE_S):
        await load.stop()
    await stage.until_quiet()
    end, late = await _read_end(stage)
    faults = check(load.history, end)
    for sentence in await _audit(stage):
        faults.add("audit", sentence)
    result.why += stage.failures + late + faults.stories
    result.counts = dict(faults.counts)
    result.lost = _sum(faults.counts, "lost", "missing", "vanished")
    result.duplicates = faults.counts["doubled"]
    result.acknowledged = len(load.history.acknowledged)
    result.unknown = load.history.unknown
    result.read = sum(len(each.rows) for each in load.history.passes)
    result.errors, result.failed_writes = load.counts.errors, load.counts.failed_writes
    result.why += broken_bounds(drill.bounds, result, settings)


def _sum(counts: Counter[str], *kinds: str) -> int:
    return sum(counts[kind] for kind in kinds)


async def _read_end(stage: Stage) -> tuple[End, list[str]]:
    """What the master shows now, and what kept consumers from coming to the end."""
    async with Client(stage.cluster.addresses, timeout=SETTLE_S) as client:
        rows = (await client.describe(TOPIC))["partitions"]
        late = await stage.load.finish({row["partition"]: row["latest"] for row in rows}, SETTLE_S)
        end = End()
        for view, into in (("raw", end.raw), ("compacted", end.view)):
            async for page in client.reader(TOPIC, view=view, until_end=True).pages():
                into += [row_of(record) for record in page]
        keys = [b"key-%d" % n for n in range(KEYS)] + [b"hot-%d" % n for n in range(HOT_KEYS)]
        for key, found in zip(keys, await client.get_many(TOPIC, keys), strict=True):
            end.gets[key] = None if found is None else row_of(found)
    return end, late


async def _audit(stage: Stage) -> list[str]:
    """Stop the cluster, and hold its folders against one another, by every release that ran on them."""
    wrong = await stage.cluster.stop()
    folders = [str(node.data) for node in stage.nodes]
    for release in sorted({None, stage.release}, key=str):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "firn_node.drills.audit", *folders,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment_of(release),
        )  # fmt: skip
        said, _ = await process.communicate()
        wrong += said.decode().splitlines()
    return wrong


def broken_bounds(bounds: Bounds, result: Result, settings: Settings) -> list[str]:
    found = []
    if bounds.elections_max is not None and result.elections > bounds.elections_max and settings.holds_times:
        found.append(f"{result.elections} elections, at most {bounds.elections_max} are allowed")
    if result.failed_writes and not bounds.has_failed_writes:
        found.append(
            f"{result.failed_writes} writes were not acknowledged to clients that asked again: {result.errors}"
        )
    if result.elections < bounds.elections_min:
        found.append(f"{result.elections} elections, at least {bounds.elections_min} were expected")
    if not settings.holds_times:
        return found
    limit = None if bounds.gap_s is None else bounds.gap_s(settings.ttl_s)
    if limit is not None and result.gap_s is not None and result.gap_s > limit:
        found.append(f"{result.gap_s:g} s without an acknowledged write, at most {limit:g} s are allowed")
    if result.healthy_s is not None and result.healthy_s > bounds.healthy_s:
        found.append(f"{result.healthy_s:g} s until all was well, at most {bounds.healthy_s:g} s are allowed")
    return found
