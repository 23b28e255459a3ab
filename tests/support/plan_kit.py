"""What Spark does in a plan of a forced compaction, in plain Python: slow, and plainly right."""

import asyncio
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from engine_kit import Kit

from firn.statement import Subject, encode

Rows = Iterable[tuple[int, bytes]]  # (offset, key)


def said_of(rows: Rows, *, plan_end: int, slice: int = 0, slices: int = 1) -> tuple[list[int], list[int]]:
    """The offsets that a task sees in its slice, and those that are dead."""
    mine = [(offset, key) for offset, key in rows if offset < plan_end and zlib.crc32(key) % slices == slice]
    newest = {key: offset for offset, key in sorted(mine)}
    return sorted(o for o, _ in mine), sorted(o for o, key in mine if newest[key] != o)


def statement(plan: dict[str, Any], part: dict[str, Any], slice: int, rows: Rows) -> bytes:
    seen, dead = said_of(rows, plan_end=part["plan_end"], slice=slice, slices=part["slices"])
    return encoded(plan, part, slice, seen, dead)


def encoded(
    plan: dict[str, Any], part: dict[str, Any], slice: int, seen: list[int], dead: list[int]
) -> bytes:
    subject = Subject(
        plan=plan["id"], topic_id=plan["topic_id"], partition=part["partition"], slice=slice,
        slices=part["slices"], plan_end=part["plan_end"],
    )  # fmt: skip
    return b"".join(encode(subject, np.array(seen, np.int64), np.array(dead, np.int64)))


async def keys(kit: Kit, topic: str, partition: int) -> list[tuple[int, bytes]]:
    """The rows of the compacted view, as a task reads them."""
    return [(r.offset, r.key) for r in await kit.read(topic, partition=partition)]


async def upload(
    kit: Kit, plan: dict[str, Any], part: dict[str, Any], slice: int, data: bytes
) -> dict[str, Any]:
    taken = kit.broker.upload_to_plan(plan["topic"], plan["id"], part["partition"], slice)
    try:
        await taken.write(data[: len(data) // 2])
        await taken.write(data[len(data) // 2 :])
        return await taken.finish()
    finally:
        await taken.close()


async def open_plan(
    kit: Kit, topic: str = "t", *, run: str = "", slice_records: int = 1000
) -> dict[str, Any]:
    return (await kit.broker.open_plan(topic, run=run, slice_records=slice_records))[0]


async def map_all(kit: Kit, plan: dict[str, Any]) -> None:
    """What all tasks of a plan do that are missing."""
    for part in plan["partitions"]:
        rows = await keys(kit, plan["topic"], part["partition"]) if part["missing"] else []
        for slice in part["missing"]:
            await upload(kit, plan, part, slice, statement(plan, part, slice, rows))


async def ended(kit: Kit, topic: str = "t") -> dict[str, Any]:
    while (found := kit.broker.plan(topic))["state"] == "open":
        await asyncio.sleep(0.005)
    return found


async def compact_by_plan(kit: Kit, topic: str = "t", *, slice_records: int = 1000) -> dict[str, Any]:
    plan = await open_plan(kit, topic, slice_records=slice_records)
    await map_all(kit, plan)
    return await ended(kit, topic)
