"""The compacted log of one partition: files, generations, pins, reads.

Invariants:

- what the manifest does not name does not exist; files beside it are deleted at open;
- file names are never used twice within a process, so a reader's lease can never meet other bytes;
- a generation that is pinned keeps its files; the others go through ``FileCache.retire``;
- an idle log holds no open file; without data it has no folder.

A log may be used from several threads; one at a time swaps (the engine has one compactor thread, and seals from
the dispatcher: the swap lock orders them).
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from firn.batch import Buffer, iterate
from firn.errors import Corrupt, FirnError, Invalid
from firn_node import failpoints
from firn_node.compaction import decide
from firn_node.compaction import manifest as manifests
from firn_node.compaction import mask as masks
from firn_node.compaction.answers import I64, Answers, FoundRow, Wanted
from firn_node.compaction.keyindex import BlockCache, DamagedIndex, FileKeyIndex, newest_rows
from firn_node.compaction.manifest import CleanSegment, DirtySegment, Manifest
from firn_node.compaction.segment import KIND_KEYS, Layout, SegmentReader, SegmentWriter, open_key_index
from firn_node.compaction.view import Part, SegmentView, View, load_mask
from firn_node.disk import Disk, read_file
from firn_node.filecache import FileCache
from firn_node.kernels.hashing import fingerprint
from firn_node.kernels.sorting import sort_key_index

U64 = NDArray[np.uint64]
T = TypeVar("T")
_log = logging.getLogger(__name__)
# What is kept of the batches that `get` has touched, of all logs together; the broker's settings say how much.
BLOCK_CACHE = BlockCache(16 << 20)

# The batches of the dirty offsets [start, end), in order: how a damaged sealed key index is made anew.
DirtySource = Callable[[int, int], Iterator[Buffer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStats:
    """Of the clean part; ``dirty_bytes`` are those of sealed dirty segments above the horizon."""

    bytes: int
    rows: int
    masked: int
    live: int
    tombstones: int
    dirty_bytes: int
    # When the oldest tombstone still in its time was covered; it is over deleteRetention after. None: there is none.
    next_tombstone_ms: int | None
    oldest_masked_ms: int | None


class Pin:
    """A generation whose files stay until ``release``; releasing twice is harmless."""

    __slots__ = ("_log", "view")

    def __init__(self, log: "CompactedLog", view: View) -> None:
        self._log: CompactedLog | None = log
        self.view = view

    @property
    def manifest(self) -> Manifest:
        return self.view.manifest

    def release(self) -> None:
        if self._log is not None:
            log, self._log = self._log, None
            log._unpin(self.view)

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class CompactedLog:
    def __init__(
        self, disk: Disk, cache: FileCache, folder: str, found: Manifest,
        *, secret: U64 | None = None, dirty_source: DirtySource | None = None, blocks: BlockCache = BLOCK_CACHE,
    ) -> None:  # fmt: skip
        self.disk = disk
        self.cache = cache
        self.folder = folder
        self.dirty_source = dirty_source
        self._secret = secret
        self._blocks = blocks
        self._lock = RLock()
        self._next_file = found.next_file
        self._pins: dict[int, tuple[View, int]] = {}
        self._retired: set[str] = set()  # of older generations: unlinked when no pin names them
        self._dirty: dict[str, FileKeyIndex] = {}
        self._view = self._make_view(found, None)

    @classmethod
    def open(
        cls, disk: Disk, cache: FileCache, folder: str, *, topic_id: int, partition: int,
        secret: U64 | None = None, dirty_source: DirtySource | None = None,
    ) -> "CompactedLog":  # fmt: skip
        """The log in a folder; no folder is an empty log.

        ``secret`` and ``dirty_source`` serve the repair of a damaged key index; without them it is Corrupt.

        *Effects*: files that the manifest does not name are deleted.
        *Errors*: Corrupt when the manifest is damaged or a file that it names is missing (masks and rebuilt key
        indexes excepted: those are made anew).
        """
        path = os.path.join(folder, manifests.FILE_NAME)
        found = Manifest(topic_id=topic_id, partition=partition)
        names = disk.list(folder)
        if manifests.FILE_NAME in names:
            found = manifests.decode(read_file(disk, path), file=path)
            manifests.check_loaded(found, file=path, topic_id=topic_id, partition=partition)
        for segment in found.segments:
            if segment.name not in names:
                raise Corrupt(
                    f"{folder}: {segment.name} is missing",
                    file=os.path.join(folder, segment.name),
                    position=0,
                )
        for name in set(names) - found.files() - {manifests.FILE_NAME}:
            cache.retire(os.path.join(folder, name))
        return cls(disk, cache, folder, found, secret=secret, dirty_source=dirty_source)

    @property
    def manifest(self) -> Manifest:
        return self._view.manifest

    @property
    def view(self) -> View:
        return self._view

    @property
    def is_pinned(self) -> bool:
        """Somebody reads a generation, or files of an older one wait for its readers to leave."""
        return bool(self._pins or self._retired)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def new_name(self, kind: str) -> str:
        """A file name that was never used in this process nor by the manifest."""
        with self._lock:
            number, self._next_file = self._next_file, self._next_file + 1
        return f"{number:012d}.{kind}"

    # Writing.

    def seal(
        self, start: int, end: int, rows: Iterable[tuple[U64, U64]], *, bytes: int, max_append_ms: int
    ) -> None:
        """Name the key index of the dirty offsets ``[start, end)``; row = offset - start, all rows there.

        *Shape*: ``rows`` is (hi, word) in portions of any size, in key index order.
        *Effects*: durable on return. 1. write the file, 2. sync it, 3. swap the manifest.
        *Errors*: Invalid when the rows do not fit the range or the range what is sealed already.
        """
        if end - start > manifests.ROWS_MAX:
            raise Invalid(f"seal of [{start}, {end}): at most {manifests.ROWS_MAX} key rows")
        self.disk.make_folder(self.folder)
        name = self.new_name("dirty")
        writer = self._key_file(name)
        try:
            for hi, word in rows:
                writer.add_keys(hi, word)
            found = writer.finish(start=start, end=end).rows
            if found != end - start:
                raise Invalid(f"seal of [{start}, {end}): {found} key rows")
            failpoints.step("seal.written")
            with self._lock:
                m = self.manifest
                if end <= m.horizon:  # a compaction has covered the rows meanwhile
                    self.discard([name])
                    return
                if m.dirty and start < m.dirty[-1].end:
                    raise Invalid(f"seal of [{start}, {end}): sealed up to {m.dirty[-1].end} already")
                sealed = DirtySegment(
                    name=name, start=start, end=end, bytes=bytes, max_append_ms=max_append_ms
                )
                self.swap(lambda m: replace(m, dirty=(*m.dirty, sealed)))
        except (OSError, FirnError) as error:
            if not isinstance(error, SwapUncertain):
                self.discard([name])
            raise

    def swap(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Make what ``change`` gives of the current manifest the manifest; generation and file number are set here.

        *Effects*: durable on return; files that no generation in use names are retired. When the rename has
        happened and the sync of the folder fails, both generations' files stay and the old one goes on serving:
        either may be found at the next start. Files named by ``change`` must be synced by the caller.

        1. sync the folder (names of new files), 2. write the temporary manifest, 3. sync it, 4. rename it,
        5. sync the folder, 6. retire what is not named any more.
        """
        with self._lock:
            old = self.manifest
            new = replace(change(old), generation=old.generation + 1, next_file=self._next_file)
            manifests.check_swap(old, new)
            self._replace_manifest(new.encode())
            failpoints.step("swap.done")
            self._view = self._make_view(new, self._view)
            self._retired |= old.files() - new.files()
            self._dirty = {name: index for name, index in self._dirty.items() if name in new.files()}
            self._retire()
            return new

    def _replace_manifest(self, data: bytes) -> None:
        """Steps 1 to 5 of ``swap``. *Errors*: OSError: the old one is there; SwapUncertain: either may be."""
        path = self.path(manifests.FILE_NAME)
        temporary = f"{path}.tmp"
        self.disk.make_folder(self.folder)
        self.disk.sync_folder(self.folder)
        failpoints.step("swap.folder_synced")
        self.disk.unlink(temporary)
        try:
            file = self.disk.open(temporary, "create")
            try:
                file.pwrite([data], 0)
                failpoints.step("swap.manifest_written")
                file.sync()
            finally:
                file.close()
            failpoints.step("swap.manifest_synced")
            self.disk.rename(temporary, path)
        except OSError as error:
            if self.disk.exists(path) and read_file(self.disk, path) == data:
                raise SwapUncertain(*error.args) from error
            self.disk.unlink(temporary)
            raise
        failpoints.step("swap.manifest_renamed")
        try:
            self.disk.sync_folder(self.folder)
        except OSError as error:
            raise SwapUncertain(*error.args) from error

    def discard(self, names: Sequence[str]) -> None:
        """Remove files that no manifest names: those of a compaction that failed."""
        for name in names:
            if name not in self.manifest.files():
                self.cache.retire(self.path(name))

    def remove(self) -> None:
        """Delete the partition's folder: its topic is gone. *Effects*: may be repeated; readers finish."""
        with self._lock:
            for name in self.manifest.files() | self._retired:
                self.cache.retire(self.path(name))
            self.disk.unlink(self.path(manifests.FILE_NAME))
            self.disk.remove_tree(self.folder)

    # Reading.

    def pin(self) -> Pin:
        with self._lock:
            view, count = self._pins.get(self._view.manifest.generation, (self._view, 0))
            self._pins[view.manifest.generation] = (view, count + 1)
            return Pin(self, view)

    def read(
        self, offset: int, max_bytes: int, *, pin: Pin | None = None, keys_only: bool = False
    ) -> tuple[list[Part], int]:
        """Whole batches of one generation from ``offset`` on; see ``View.read``.

        *Shape*: the second value is where to go on, the horizon when nothing is left below it.
        *Errors*: Corrupt.
        """
        if pin is not None:
            return pin.view.read(offset, max_bytes, keys_only=keys_only)
        with self.pin() as own:
            return own.view.read(offset, max_bytes, keys_only=keys_only)

    def newest(self, key: bytes, hi: int, lo: int) -> FoundRow | None:
        """The newest unmasked row of a key in the clean part; key bytes are compared. *Errors*: Corrupt."""
        return self._found(lambda view: view.find(key, int(hi), int(lo)))

    def newest_many(self, wanted: Wanted, picks: I64, answers: Answers) -> None:
        """As ``newest``, for many keys of one generation; AGAIN where that has to tell. *Errors*: Corrupt."""
        if len(picks):
            self._found(lambda view: view.find_many(wanted, picks, answers))

    def _found(self, find: Callable[[View], T]) -> T:
        for _ in range(len(self.manifest.segments) + 1):
            try:
                with self.pin() as own:
                    return find(own.view)
            except DamagedIndex as error:
                self.repair(error)
        raise Corrupt(
            f"{self.folder}: key indexes are damaged and could not be rebuilt", file=self.folder, position=0
        )

    def dirty_newest_many(self, hi: U64, lo: NDArray[np.uint32]) -> I64:
        """The newest offset of each fingerprint in sealed dirty segments; -1: none, -2: ``dirty_newest`` has to tell.

        *Errors*: Corrupt.
        """
        found = np.full(len(hi), -1, np.int64)
        left = np.arange(len(hi))
        with self.pin() as own:
            for segment in reversed(own.manifest.dirty):
                try:
                    rows = newest_rows(self.dirty_index(segment), hi[left], lo[left])
                except DamagedIndex:  # one by one they repair it
                    found[left] = -2
                    break
                offsets = np.where(rows >= 0, segment.start + rows, rows)
                offsets[(rows >= 0) & (offsets < own.manifest.horizon)] = -1
                found[left] = offsets
                left = left[offsets == -1]
        return found

    def dirty_newest(self, hi: int, lo: int) -> Iterator[int]:
        """Candidate offsets at or above the horizon in sealed dirty segments, newest first. *Errors*: Corrupt."""
        if not self.manifest.dirty:
            return
        with self.pin() as own:
            for segment in reversed(own.manifest.dirty):
                for row in self._dirty_candidates(segment, int(hi), int(lo)):
                    if segment.start + row >= own.manifest.horizon:
                        yield segment.start + row

    def _dirty_candidates(self, segment: DirtySegment, hi: int, lo: int) -> list[int]:
        for _ in range(2):
            try:
                return self.dirty_index(segment).find(hi, lo)
            except DamagedIndex as error:
                self.repair(error)
                segment = next(d for d in self.manifest.dirty if d.start == segment.start)
        raise Corrupt(
            f"{self.path(segment.name)}: damaged again after it was rebuilt", file=segment.name, position=0
        )

    def dirty_index(self, segment: DirtySegment) -> FileKeyIndex:
        """The key index of a sealed dirty segment. *Errors*: DamagedIndex."""
        found = self._dirty.get(segment.name)
        if found is None:
            layout = Layout(rows=segment.end - segment.start, batches=0, bytes=0)
            try:
                found = open_key_index(self.cache, self.path(segment.name), layout)
            except FileNotFoundError as error:
                path = self.path(segment.name)
                raise DamagedIndex(f"{path}: the key index is missing", file=path, position=0) from error
            self._dirty[segment.name] = found
        return found

    def stats(self) -> LogStats:
        m = self.manifest
        since = [s.masked_since_ms for s in m.segments if s.masked_since_ms is not None]
        return LogStats(
            bytes=m.clean_bytes, rows=m.rows, masked=m.masked, live=m.rows - m.masked,
            tombstones=sum(s.tombstones for s in m.segments), dirty_bytes=sum(d.bytes for d in m.dirty),
            next_tombstone_ms=m.cover_times[0][1] if m.cover_times else None,
            oldest_masked_ms=min(since) if since else None,
        )  # fmt: skip

    # Repair.

    def repair(self, damage: DamagedIndex) -> None:
        """Make a damaged key index anew from the batches and name it in the manifest.

        *Effects*: durable on return. Takes 40 bytes of memory per row: damage is rare.
        *Errors*: Corrupt when the batches are damaged too or the secret is not known.
        """
        path = damage.details["file"]
        with self._lock:
            for segment in self.manifest.segments:
                if path in (self.path(segment.name), self.path(segment.keys or "")):
                    self._repair_clean(segment)
                    return
            for dirty in self.manifest.dirty:
                if path == self.path(dirty.name):
                    self._repair_dirty(dirty, damage)
                    return

    def _repair_clean(self, segment: CleanSegment) -> None:
        reader = self._reader(replace(segment, keys=None))
        data = (reader.read(n, keys_only=True) for n in range(len(reader.batches)))
        name = self._write_keys(
            ((b.columns.keys, b.columns.key_lengths, b.columns.tombstones) for b in data), 0, segment.rows
        )
        self.swap(
            lambda m: replace(
                m, segments=tuple(replace(s, keys=name) if s.name == segment.name else s for s in m.segments)
            )
        )

    def _repair_dirty(self, dirty: DirtySegment, damage: DamagedIndex) -> None:
        if self.dirty_source is None:
            raise damage
        batches = (b for data in self.dirty_source(dirty.start, dirty.end) for b in iterate(data))

        def rows() -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.bool_]]]:
            for batch in batches:
                batch.verify()
                c = batch.columns
                a, b = np.searchsorted(c.offsets, [dirty.start, dirty.end]).tolist()
                if a < b:
                    starts = c.key_starts()
                    yield c.keys[starts[a] : starts[b]], c.key_lengths[a:b], c.tombstones[a:b]

        name = self._write_keys(rows(), dirty.start, dirty.end)
        self.swap(
            lambda m: replace(
                m, dirty=tuple(replace(d, name=name) if d.name == dirty.name else d for d in m.dirty)
            )
        )

    def _write_keys(
        self,
        pieces: Iterator[tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.bool_]]],
        start: int,
        end: int,
    ) -> str:
        """A new key index file over all keys, in row order; its name."""
        if self._secret is None:
            raise Corrupt(
                f"{self.folder}: a key index is damaged; rebuilding it needs the secret",
                file=self.folder,
                position=0,
            )
        found: list[tuple[U64, U64]] = []
        row = 0
        for keys, lengths, tombstones in pieces:
            hi, lo = fingerprint(keys, lengths, self.manifest.topic_id, self._secret)
            rows = np.arange(row, row + len(hi), dtype=np.uint64)
            row += len(hi)
            word: U64 = lo.astype(np.uint64)
            word = (word << np.uint64(32)) + (rows << np.uint64(1))
            word[tombstones] += np.uint64(1)
            found.append((hi, word))
        if row != end - start:
            raise Corrupt(
                f"{self.folder}: {row} records for a key index of {end - start}", file=self.folder, position=0
            )
        his, words = sort_key_index(
            np.concatenate([h for h, _ in found]), np.concatenate([w for _, w in found])
        )
        name = self.new_name("keys")
        writer = self._key_file(name)
        writer.add_keys(his, words)
        writer.finish(start=start, end=end)
        return name

    def _load_mask(self, manifest: Manifest, info: CleanSegment) -> masks.Bits:
        """The mask of a segment; a damaged one is decided anew (see ``mask`` for why that is exact)."""
        assert info.mask is not None
        try:
            return load_mask(self.cache, self.path(info.mask), info)
        except Corrupt:
            readers = [(s, self._reader(s)) for s in manifest.segments]
            return decide.rebuild_masks(readers, manifest.tombstone_floor)[info.name]

    def _key_file(self, name: str) -> SegmentWriter:
        m = self.manifest
        return SegmentWriter(
            self.disk, self.path(name), topic_id=m.topic_id, partition=m.partition, kind=KIND_KEYS
        )

    def _reader(self, info: CleanSegment) -> SegmentReader:
        layout = Layout(rows=info.rows, batches=info.batches, bytes=info.bytes)
        keys = self.path(info.keys) if info.keys is not None else None
        return SegmentReader(self.cache, self.path(info.name), layout, self._blocks, keys_path=keys)

    def _make_view(self, manifest: Manifest, before: View | None) -> View:
        known = {(s.info.name, s.info.keys): s for s in before.segments} if before is not None else {}
        segments = []
        for info in manifest.segments:
            same = known.get((info.name, info.keys))
            if same is not None and same.info == info:
                segments.append(same)
                continue
            reader = same.reader if same is not None else self._reader(info)
            segments.append(SegmentView(info, reader, lambda s: self._load_mask(manifest, s)))
        return View(manifest, segments)

    def _unpin(self, view: View) -> None:
        with self._lock:
            generation = view.manifest.generation
            _, count = self._pins[generation]
            if count > 1:
                self._pins[generation] = (view, count - 1)
                return
            del self._pins[generation]
            self._retire()

    def _retire(self) -> None:
        """Unlink the files of older generations that no pin names."""
        if not self._retired:
            return
        needed = self.manifest.files()
        for view, _ in self._pins.values():
            needed |= view.manifest.files()
        gone = self._retired - needed
        self._retired -= gone
        for name in sorted(gone):
            try:
                self.cache.retire(self.path(name))
            except OSError as error:  # the swap has happened: a file that stays is a leftover, no failure
                _log.warning("%s stays until the log is opened again: %s", self.path(name), error)


class SwapUncertain(OSError):
    """The manifest was renamed, but the folder could not be synced: both generations' files must stay."""
