"""A snapshot on disk: a folder of Parquet files and the document that names them.

::

    FOLDER/
      _firn_snapshot.json                           the document; a name with ``_`` is no data to Spark
      partition-00000-<run>-<attempt>.parquet       one a partition
    FOLDER.partial/                                 the same on its way, without the document

Invariants: FOLDER appears by one rename, whole; a file's name is given once, to one attempt of one task; a file has
its last name only when its footer is written. The footer of each says which part of which topic it holds (key
``firn``, JSON), so a run that was interrupted goes on with what is there, and asks no list that could be lost with it.

=========== =====================================================================
column      type
=========== =====================================================================
partition   int32
offset      int64
timestamp   timestamp[us, UTC]
key         binary
value       binary, never null
tag         string, null: none
headers     map<string, string>, null: none
=========== =====================================================================
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from firn.errors import Corrupt, Invalid
from firn_spark.jobs.livemap import COLUMNS

if TYPE_CHECKING:
    from pyarrow import RecordBatch

DOCUMENT = "_firn_snapshot.json"
FORMAT = 1
_FOOTER = b"firn"
RENAMING = ("file", "hdfs")  # file systems that rename a folder at once


@dataclass(frozen=True, slots=True)
class Part:
    """One partition of a snapshot: the map of the offsets ``[0, end)`` as it was at ``taken_ms``."""

    topic: str
    topic_id: int
    partition: int
    end: int
    taken_ms: int
    records: int
    file: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """A folder by its address: a path, or a URI of a file system that renames folders."""

    address: str

    @property
    def scheme(self) -> str:
        """Empty: a path of this machine."""
        name, colon, rest = self.address.partition(":")
        return name if colon and (name == "file" or rest.startswith("//")) else ""

    def opened(self) -> tuple[Any, str]:
        """pyarrow's file system and the path in it. Errors: Invalid."""
        import pyarrow as pa
        from pyarrow.fs import FileSystem, LocalFileSystem

        if not self.scheme:
            return LocalFileSystem(), str(PurePosixPath(_absolute(self.address)))
        if self.scheme not in RENAMING:
            raise Invalid(
                f"{self.address}: a snapshot appears by the rename of a folder, which {self.scheme}: does not have; write "
                "it to a volume, then copy the folder"
            )
        try:
            system, path = FileSystem.from_uri(self.address)
        except (pa.ArrowInvalid, OSError) as error:
            raise Invalid(f"{self.address}: {error}") from error
        return system, path.rstrip("/")

    def uri(self, name: str) -> str:
        """The address of a file in it, for Spark."""
        base = self.address if self.scheme else "file://" + _absolute(self.address)
        return f"{base.rstrip('/')}/{name}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole one, as its document describes it."""

    place: Place
    topic: str
    topic_id: int
    spec: Mapping[str, Any]
    parts: tuple[Part, ...]

    @property
    def ends(self) -> dict[int, int]:
        return {part.partition: part.end for part in self.parts}

    @property
    def files(self) -> list[str]:
        """The addresses of its files, for Spark; those without a record are left out."""
        return [self.place.uri(part.file) for part in self.parts if part.records]


def partial(address: str) -> Place:
    """Where a snapshot lies until it is whole."""
    return Place(address.rstrip("/") + ".partial")


def write_part(place: Place, part: Part, batches: "Iterable[RecordBatch]") -> Part:
    """Write one partition's file; the part with what is in it. ``part.file`` is the name that only this attempt has.

    Effects: the file is whole under its name, or not there.
    """
    import pyarrow.parquet as pq

    system, folder = place.opened()
    path, unfinished = f"{folder}/{part.file}", f"{folder}/_{part.file}"
    records = 0
    with (
        system.open_output_stream(unfinished) as stream,
        pq.ParquetWriter(stream, _schema(), compression="zstd") as file,
    ):
        for batch in batches:
            file.write_batch(batch.select(COLUMNS).cast(_schema()))
            records += batch.num_rows
        told = {**asdict(part), "records": records, "bytes": 0, "format": FORMAT}
        file.add_key_value_metadata({_FOOTER: json.dumps(told).encode()})
    system.move(unfinished, path)
    return Part(**{**asdict(part), "records": records, "bytes": int(system.get_file_info(path).size)})


def parts_in(place: Place) -> Iterator[Part]:
    """The parts whose files are whole, of an interrupted run's folder. A file that is none is passed over."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSelector, FileType

    system, folder = place.opened()
    if system.get_file_info(folder).type != FileType.Directory:
        return
    for info in sorted(system.get_file_info(FileSelector(folder)), key=lambda found: str(found.base_name)):
        if info.extension != "parquet" or info.base_name.startswith("_"):
            continue
        try:
            told = json.loads(pq.read_metadata(info.path, filesystem=system).metadata[_FOOTER])
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
            continue
        if told.pop("format", None) == FORMAT:
            yield Part(**{**told, "bytes": int(info.size)})


def publish(
    place: Place, target: str, topic: str, spec: Mapping[str, Any], parts: Iterable[Part]
) -> Snapshot:
    """Let the snapshot appear at ``target``: whole, and nothing but it.

    Errors: Invalid when something is there by now, or when a file that an executor wrote cannot be seen from here.
    """
    chosen = tuple(sorted(parts, key=lambda part: part.partition))
    system, folder = place.opened()
    _check_files(system, folder, place, chosen)
    _drop_others(system, folder, {part.file for part in chosen})
    # 1. The document, beside the files. 2. The rename, which fails when the target is there.
    document = {
        "format": FORMAT, "topic": topic, "topic_id": chosen[0].topic_id, "spec": spec,
        "records": sum(part.records for part in chosen), "partitions": [asdict(part) for part in chosen],
    }  # fmt: skip
    with system.open_output_stream(f"{folder}/{DOCUMENT}") as stream:
        stream.write(json.dumps(document, indent=1).encode())
    check_free(target)
    system.move(folder, Place(target).opened()[1])
    return Snapshot(Place(target), topic, chosen[0].topic_id, spec, chosen)


def check_free(target: str) -> None:
    """Errors: Invalid when ``target`` is there."""
    from pyarrow.fs import FileType

    system, path = Place(target).opened()
    if system.get_file_info(path).type != FileType.NotFound:
        raise Invalid(f"{target} is there already: a snapshot is written to a new folder")


def snapshot_at(address: str) -> Snapshot | None:
    """The snapshot in a folder; None when it has no document of one, or is where snapshots are not.

    Errors: Corrupt when the document is damaged, or a file that it names is not there as it was written.
    """
    from pyarrow.fs import FileType

    place = Place(address)
    if place.scheme and place.scheme not in RENAMING:
        return None
    system, folder = place.opened()
    path = f"{folder}/{DOCUMENT}"
    if system.get_file_info(path).type != FileType.File:
        return None
    with system.open_input_stream(path) as stream:
        text = stream.read()
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise Invalid(f"{path}: format {found['format']!r} is unknown; this version reads {FORMAT}")
        parts = tuple(Part(**part) for part in found["partitions"])
        snapshot = Snapshot(place, str(found["topic"]), int(found["topic_id"]), dict(found["spec"]), parts)
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{path}: no document of a snapshot: {error!r}") from error
    _check_files(system, folder, place, parts)
    return snapshot


def _check_files(system: Any, folder: str, place: Place, parts: Iterable[Part]) -> None:
    for part in parts:
        size = system.get_file_info(f"{folder}/{part.file}").size
        if size != part.bytes:
            found = "it is not there" if size is None else f"it has {size}"
            raise Corrupt(
                f"{place.address}/{part.file}: expected {part.bytes} bytes, {found}; "
                "the folder must be the same one for the driver and all executors, and stay as it was written"
            )


def _drop_others(system: Any, folder: str, kept: set[str]) -> None:
    from pyarrow.fs import FileSelector

    for info in system.get_file_info(FileSelector(folder)):
        if info.base_name not in kept:
            system.delete_file(info.path)


def _absolute(path: str) -> str:
    from pathlib import Path

    return str(Path(path).expanduser().absolute())


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("key", pa.binary(), nullable=False),
            pa.field("value", pa.binary(), nullable=False),
            pa.field("tag", pa.string()),
            pa.field("headers", pa.map_(pa.string(), pa.string())),
        ]
    )
