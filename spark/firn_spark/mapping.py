"""The task of a forced compaction: read a slice's keys, find the dead rows, upload a statement about them.

A task may run twice, be late, or meet a plan that is gone: it then does nothing, and says so. What it reads is one state:
a replica may compact past ``plan_end`` meanwhile, and then a row that was read before may have lost a newer one below
``plan_end`` to a still newer one above it. So a read that meets a horizon past ``plan_end`` after one that was not is begun
again; from then on every row below ``plan_end`` is the newest of its key.

Memory: one slice's keys, ``keys_bytes_max`` of them at once (``firn_spark.newest``).
"""

import socket
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from firn.client import plans
from firn.errors import AlreadyUploaded, SnapshotExpired, Unavailable, UnknownPlan
from firn.statement import Subject, encode
from firn_spark.connection import Connection
from firn_spark.fetch import Link, Range
from firn_spark.newest import KEYS_BYTES_MAX, Newest, in_passes

_READS_MAX = 10  # of one task, before it gives up: a horizon passes plan_end once
_UPLOAD_S = 300.0

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one task is about."""

    connection: Connection
    topic: str
    topic_id: int
    plan: str
    partition: int
    slice: int
    slices: int
    plan_end: int
    keys_bytes_max: int = KEYS_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """``already``: somebody else's statement counts; ``unknown_plan``: plan again."""

    partition: int
    slice: int
    outcome: Literal["uploaded", "already", "unknown_plan"]
    seen: int = 0
    dead: int = 0
    seconds: float = 0.0
    host: str = ""


class _Mixed(Exception):
    """A replica has compacted past the plan's end while it was read."""


def map_slice(asked: Slice) -> Mapped:
    """Do what is missing of a slice. *Effects*: its statement is durable at the broker on return.

    *Errors*: those of reading (``firn_spark.fetch``) and uploading.
    """
    started = time.monotonic()

    def ended(
        outcome: Literal["uploaded", "already", "unknown_plan"], seen: int = 0, dead: int = 0
    ) -> Mapped:
        return Mapped(
            partition=asked.partition, slice=asked.slice, outcome=outcome, seen=seen, dead=dead,
            seconds=time.monotonic() - started, host=socket.gethostname(),
        )  # fmt: skip

    with Link(asked.connection) as link:
        if (standing := _standing(link, asked)) != "missing":
            return ended(standing)
        seen, dead = read_slice(link, asked)
        subject = Subject(
            plan=asked.plan, topic_id=asked.topic_id, partition=asked.partition, slice=asked.slice, slices=asked.slices,
            plan_end=asked.plan_end,
        )  # fmt: skip
        data = b"".join(encode(subject, seen, dead))
        try:
            target = link.run(link.target(asked.topic))
            link.run(
                plans.upload_statement(
                    target,
                    asked.topic,
                    asked.plan,
                    partition=asked.partition,
                    slice=asked.slice,
                    data=data,
                    timeout=_UPLOAD_S,
                )
            )
        except AlreadyUploaded:
            return ended("already")
        except UnknownPlan:
            return ended("unknown_plan")
        return ended("uploaded", len(seen), len(dead))


def _standing(link: Link, asked: Slice) -> Literal["missing", "already", "unknown_plan"]:
    """Whether the plan still waits for this slice."""
    target = link.run(link.target(asked.topic))
    try:
        row = link.run(plans.planned_partition(target, asked.topic, asked.plan, asked.partition))
    except UnknownPlan:
        return "unknown_plan"
    return "missing" if asked.slice in row["missing"] else "already"


def read_slice(link: Link, asked: Slice) -> tuple[I64, I64]:
    """The offsets of a slice, and those of them that are dead, ascending. *Errors*: those of reading."""
    what = f"{asked.topic}/{asked.partition}"
    return in_passes(partial(_read_part, link, asked), what, slice=asked.slice, slices=asked.slices)


def _read_part(link: Link, asked: Slice, slice: int, slices: int) -> tuple[I64, I64]:
    last: Exception | None = None
    for _ in range(_READS_MAX):
        newest = Newest(slice=slice, slices=slices, keys_bytes_max=asked.keys_bytes_max)
        try:
            _read(link, asked, newest)
        except (_Mixed, SnapshotExpired) as error:
            last = error
            continue
        return newest.found()
    raise Unavailable(
        f"{asked.topic}/{asked.partition}: the replicas compacted {_READS_MAX} times while it was read: {last}"
    )


def _read(link: Link, asked: Slice, newest: Newest) -> None:
    whole = Range(
        topic=asked.topic, topic_id=asked.topic_id, partition=asked.partition, start=0, end=asked.plan_end,
        projection="keys", read_from="any",
    )  # fmt: skip
    had_below = False
    with closing(link.pages(whole)) as pages:
        for page in pages:
            if page.horizon > asked.plan_end and had_below:
                raise _Mixed(f"a horizon of {page.horizon} past {asked.plan_end}")
            had_below = had_below or page.horizon <= asked.plan_end
            newest.add_pieces(page.pieces)
