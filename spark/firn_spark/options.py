"""The options of ``format("firn")``, parsed once. Names are told apart without regard to case, as Spark does.

Unknown options are refused by name: a misspelt ``startingOffset`` would otherwise read everything.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

from firn.client.chunks import codecs
from firn.client.producer import BATCH_BYTES_LARGEST
from firn.errors import Invalid
from firn_spark.columns import Projection
from firn_spark.connection import OPTIONS, Connection
from firn_spark.fetch import View

EARLIEST: Literal["earliest"] = "earliest"
LATEST: Literal["latest"] = "latest"
BATCH_BYTES = 1 << 20  # the broker's indexes and compression work best from 256 KiB on
Position = Literal["earliest", "latest"] | int
Positions = Mapping[int, Position] | Literal["earliest", "latest"]
C = TypeVar("C", bound=str)

_COMMON = ("topic", "path", *OPTIONS.values())
READ = (
    *_COMMON, "view", "projection", "startingOffsets", "endingOffsets", "snapshot", "readFrom", "partitionsPerTask",
    "maxBytesPerTask",
)  # fmt: skip
STREAM = (*_COMMON, "view", "projection", "startingOffsets", "readFrom", "maxRecordsPerTrigger")
WRITE = (*_COMMON, "compression", "batchBytes")
_OF_SPARK = ("checkpointLocation",)  # handed through to sources and sinks that have no use for it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a read or a stream read asks for; a field that the other kind has no option for is at its default."""

    connection: Connection
    topic: str
    view: View = "compacted"
    projection: Projection = "records"
    starting: Positions = EARLIEST
    ending: Positions = LATEST
    snapshot: str | None = None
    read_from: Literal["master", "any"] = "master"
    partitions_per_task: int = 1  # many small partitions: fewer tasks to start
    bytes_per_task: int | None = None  # a partition with more is read by several tasks; None: by one
    records_per_trigger: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    connection: Connection
    topic: str
    compression: str = "none"
    batch_bytes: int = BATCH_BYTES


class Given:
    """Options by name; what was asked for, and what is known."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...], what: str) -> None:
        """Errors: Invalid for an unknown one."""
        self._given = {name.lower(): text for name, text in options.items()}
        names = {name.lower() for name in (*known, *_OF_SPARK)}
        if "token" in self._given:
            raise Invalid(
                "option token: options are shown in plans and logs; give tokenFile, or $FIRN_TOKEN_FILE"
            )
        for name in sorted(self._given):
            if name not in names:
                raise Invalid(f"option {name}: unknown to a {what}; known ones are {', '.join(known)}")

    def text(self, name: str) -> str | None:
        return self._given.get(name.lower()) or None

    def choice(self, name: str, choices: tuple[C, ...]) -> C:
        """One of ``choices``, the first when nothing is said. Errors: Invalid."""
        found = self.text(name)
        if found is None:
            return choices[0]
        if found.lower() not in choices:
            raise Invalid(f"option {name}: expected {' or '.join(choices)}, found {found!r}")
        return cast(C, found.lower())

    def count(self, name: str) -> int | None:
        """A whole number from 1 on. Errors: Invalid."""
        found = self.text(name)
        if found is None:
            return None
        if not found.isdecimal() or int(found) < 1:
            raise Invalid(f"option {name}: expected a whole number from 1 on, found {found!r}")
        return int(found)

    def topic(self) -> str:
        """Errors: Invalid when no topic, or two, are named."""
        topic, path = self.text("topic"), self.text("path")
        if topic and path and topic != path:
            raise Invalid(f"option topic is {topic!r}, but {path!r} was given to load() or save()")
        if not (found := topic or path):
            raise Invalid('option topic: which one? .option("topic", "flights"), or .load("flights")')
        return found

    def connection(self) -> Connection:
        return Connection.of_options(self._given)

    def positions(self, name: str, default: Literal["earliest", "latest"]) -> Positions:
        """Errors: Invalid."""
        found = self.text(name)
        if found is None:
            return default
        if found.lower() in (EARLIEST, LATEST):
            return cast(Literal["earliest", "latest"], found.lower())
        try:
            document = json.loads(found)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Invalid(
                f'option {name}: expected earliest, latest, or JSON as {{"0": 17, "1": "latest"}}, found {found!r}'
            )
        return {_partition(name, key): _position(name, value) for key, value in document.items()}


def _partition(name: str, key: str) -> int:
    if not key.isdecimal():
        raise Invalid(f"option {name}: {key!r} is not the number of a partition")
    return int(key)


def _position(name: str, value: object) -> Position:
    if value in (EARLIEST, LATEST):
        return cast(Position, value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Invalid(f"option {name}: expected an offset, earliest or latest, found {value!r}")
    return value


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Errors: Invalid, naming the option."""
    given = Given(options, READ, "read")
    found = replace(
        _of_any_read(given),
        ending=given.positions("endingOffsets", LATEST),
        snapshot=given.text("snapshot"),
        partitions_per_task=given.count("partitionsPerTask") or 1,
        bytes_per_task=given.count("maxBytesPerTask"),
    )
    if found.snapshot is not None and found.view == "raw":
        raise Invalid(
            "option snapshot: a snapshot is of the compacted view; a raw view is pinned by its offsets"
        )
    if found.read_from == "any" and found.view == "compacted":
        raise Invalid("option readFrom: the compacted view is read from a snapshot, which its master holds")
    if found.partitions_per_task > 1 and found.bytes_per_task is not None:
        raise Invalid("options partitionsPerTask and maxBytesPerTask: either join partitions or slice them")
    return found


def stream_options(options: Mapping[str, str]) -> ReadOptions:
    """Errors: Invalid, naming the option."""
    given = Given(options, STREAM, "stream read")
    found = replace(_of_any_read(given), records_per_trigger=given.count("maxRecordsPerTrigger"))
    if found.read_from == "any" and found.view == "compacted":
        raise Invalid(
            "option readFrom: a stream of the compacted view is read from the master; another replica may have compacted "
            "less, and show records whose tombstones the next one has dropped"
        )
    return found


def _of_any_read(given: Given) -> ReadOptions:
    """What a read and a stream read have in common."""
    return ReadOptions(
        connection=given.connection(),
        topic=given.topic(),
        view=given.choice("view", ("compacted", "raw")),
        projection=given.choice("projection", ("records", "keys")),
        starting=given.positions("startingOffsets", EARLIEST),
        read_from=given.choice("readFrom", ("master", "any")),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Errors: Invalid, naming the option."""
    given = Given(options, WRITE, "write")
    found = WriteOptions(
        connection=given.connection(),
        topic=given.topic(),
        compression=given.text("compression") or "none",
        batch_bytes=given.count("batchBytes") or BATCH_BYTES,
    )
    if found.batch_bytes > BATCH_BYTES_LARGEST:
        raise Invalid(f"option batchBytes: at most {BATCH_BYTES_LARGEST}, found {found.batch_bytes}")
    codecs(found.compression)
    return found
