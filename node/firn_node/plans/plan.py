"""A plan: up to which offset each partition of a topic is to be compacted by force, and what has come of it.

Invariants:

- ``plan_end`` is committed and dispatched when the plan is made, so that what is said of the offsets below it stays true;
- a partition is compacted once statements about all of its slices are here, and only while the plan is open;
- a plan is open until every partition has a result; a partition without an offset to look at has one from the start.

Stored as a msgpack map, the fields of ``Plan`` and ``PlannedPartition`` by name, behind a u32 CRC-32C, little-endian, of
it. What was uploaded is told by the statements beside it.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgpack

from firn.crc import crc32c
from firn.errors import Corrupt
from firn.statement import Subject
from firn_node.engine.api import FINAL_STATES, PartitionCompaction

VERSION = 1
PlanState = Literal["open", "done", "cancelled", "expired"]


@dataclass(slots=True)
class PlannedPartition:
    """``records``: about how many rows a task reads. ``seen`` and ``dead``: as uploaded; ``compared``: rows; the
    ``disagreements`` are their first offsets.
    """

    number: int
    plan_end: int
    records: int
    slices: int
    result: PartitionCompaction
    uploaded: set[int] = field(default_factory=set)
    seen: int = 0
    dead: int = 0
    compared: int = 0
    disagreements: list[int] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.result.state in FINAL_STATES

    @property
    def missing(self) -> list[int]:
        """The slices that nothing is known of yet; of a partition that has ended none is wanted."""
        return [] if self.has_ended else [n for n in range(self.slices) if n not in self.uploaded]

    @property
    def is_ready(self) -> bool:
        return self.result.state == "waiting" and len(self.uploaded) == self.slices

    def document(self) -> dict[str, Any]:
        return {
            **self.result.document(), "plan_end": self.plan_end, "records": self.records, "slices": self.slices,
            "uploaded": sorted(self.uploaded), "missing": self.missing, "seen": self.seen, "dead": self.dead,
            "compared": self.compared, "disagreements": self.disagreements,
        }  # fmt: skip


@dataclass(slots=True)
class Plan:
    """``run``: the name that its asker gave it. ``touched``: when its driver was last heard, by the machine's clock."""

    id: str
    run: str
    topic_id: int
    forced_epoch: int
    partitions: dict[int, PlannedPartition]
    state: PlanState = "open"
    touched: float = 0.0
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    @property
    def has_ended(self) -> bool:
        return all(part.has_ended for part in self.partitions.values())

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left that another run could do better."""
        return all(part.result.state in ("done", "disagreement") for part in self.partitions.values())

    def subject(self, part: PlannedPartition, slice: int) -> Subject:
        """What a statement about a slice of a partition must be about."""
        return Subject(
            plan=self.id, topic_id=self.topic_id, partition=part.number, slice=slice, slices=part.slices,
            plan_end=part.plan_end,
        )  # fmt: skip

    def pack(self) -> bytes:
        parts = []
        for part in self.partitions.values():
            fields: dict[str, Any] = {n: getattr(part, n) for n in _PART_FIELDS}
            parts.append({**fields, "result": asdict(part.result) if part.has_ended else None})
        body: bytes = msgpack.packb(
            {
                "version": VERSION, "id": self.id, "run": self.run, "topic_id": self.topic_id,
                "forced_epoch": self.forced_epoch, "state": self.state, "partitions": parts,
            }
        )  # fmt: skip
        return crc32c(body).to_bytes(4, "little") + body


_PART_FIELDS = ("number", "plan_end", "records", "slices", "seen", "dead", "compared", "disagreements")


def unpack(data: bytes, *, file: str) -> Plan:
    """*Errors*: Corrupt; the plan is lost then, and nothing else."""
    crc, body = int.from_bytes(data[:4], "little"), data[4:]
    if len(data) < 5 or crc != crc32c(body):
        raise Corrupt(f"{file}: expected CRC {crc:#010x}, found {crc32c(body):#010x}", file=file)
    found = msgpack.unpackb(body)
    if found["version"] != VERSION:
        raise Corrupt(
            f"{file}: version {found['version']} is of a newer firn; this one reads {VERSION}", file=file
        )
    parts = {}
    for fields in found["partitions"]:
        result = fields.pop("result")
        number = fields["number"]
        made = PartitionCompaction(number) if result is None else PartitionCompaction(**result)
        parts[number] = PlannedPartition(**fields, result=made)
    return Plan(
        found["id"], found["run"], found["topic_id"], found["forced_epoch"], parts, found["state"]
    )  # fmt: skip
