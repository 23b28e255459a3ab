"""The master as the simulated standby asks it: the real ``Source``, over a connection that ends at any moment.

Each request takes simulated time, in which everything else goes on. The variants below leave out a clause of the rebuild:
what they answer is what a standby without it would put together. Each of these joins segments of two generations where
both have a boundary, so that every check of a single segment holds.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BufferedIOBase, BytesIO
from typing import Any

import msgpack
from firn_sim.rebuild.node import Cluster, Node
from firn_sim.turns import current_turn

from firn.batch import iterate
from firn.errors import Unavailable
from firn_node.compaction import manifest as manifests
from firn_node.compaction.manifest import CleanSegment, Manifest
from firn_node.rebuild.remote import Pinned, Remote, Where
from firn_node.rebuild.source import Source

Key = tuple[int, int]
_COMPOSITE_FILE = 1 << 20  # names of joined segments begin here


class Faults:
    """``broken``: share of requests after which the connection is gone; ``request_s``: how long one takes."""

    def __init__(self, request_s: tuple[float, float]) -> None:
        self.broken = 0.0
        self.request_s = request_s


class SimRemote(Remote):
    def __init__(self, cluster: Cluster, faults: Faults, node: Node, where: Where) -> None:
        super().__init__(where)
        self.node = node  # who asks
        self._cluster = cluster
        self._faults = faults
        self._rng = cluster.rng
        self._master = cluster.at(where.address)
        self._life = self._master.life
        self._is_ended = False

    def rows(self, start: int) -> Iterator[list[Any]]:
        with self._source(start).rows(start) as rows:
            for number, row in enumerate(rows):
                if number % 4 == 3:
                    self._travel()
                yield msgpack.unpackb(msgpack.packb(row))

    def pin(self, topic_id: int, number: int, start: int) -> Pinned:
        given = self._source(start).give(topic_id, number, start)
        return Pinned(given.id, manifests.decode(given.manifest.encode(), file="-"), given.position)

    def batches(self, pin: str, segment: int, position: int, size: int) -> BufferedIOBase:
        self._travel()
        data = self._bytes(pin, segment, position, size)
        if self._rng.random() < self._faults.broken:
            data = data[: self._rng.randrange(size)]
        return BytesIO(data)

    def _bytes(self, pin: str, segment: int, position: int, size: int) -> bytes:
        part = self._master.source.batches(pin, segment, position, size)
        with part.lease:
            return part.read()

    def mask(self, pin: str, segment: int) -> bytes:
        self._travel()
        return self._master.source.mask(pin, segment)

    def release(self, pin: str) -> None:
        if self._is_there:
            self._master.source.take_back(pin)

    def close(self) -> None:
        self._is_ended = True

    def hang_up(self) -> None:
        """The next request connects anew."""

    @property
    def _is_there(self) -> bool:
        return self._master.is_up and self._master.life == self._life

    def _source(self, start: int) -> Source:
        """As ``Broker.rebuild_source``."""
        self._travel()
        master, turn = self._master, current_turn()
        assert turn is not None, "a rebuild asks from a thread"
        if not master.rebuilding.whole.is_set() or self._cluster.master is not master:
            raise Unavailable(f"{master.name} cannot tell now")
        if master.core.index.checkpoint < start:
            turn.wait(master.checkpoint())
        return master.source

    def _travel(self) -> None:
        turn = current_turn()
        assert turn is not None, "a rebuild asks from a thread"
        turn.pause(self._rng.uniform(*self._faults.request_s))
        if self._is_ended:
            raise Unavailable("this node is stopping")
        if not self._is_there or self._rng.random() < self._faults.broken:
            raise ConnectionResetError("the connection has ended")


# One clause left out.


@dataclass(frozen=True, slots=True)
class Piece:
    info: CleanSegment
    data: bytes
    mask: bytes | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A partition's compacted log as a whole, in memory."""

    manifest: Manifest
    pieces: tuple[Piece, ...]


def whole(source: Source, pin: str, manifest: Manifest) -> Generation:
    """What lies under a pin."""
    pieces = []
    for number, info in enumerate(manifest.segments):
        part = source.batches(pin, number, 0, info.bytes)
        with part.lease:
            data = part.read()
        pieces.append(Piece(info, data, source.mask(pin, number) if info.mask is not None else None))
    return Generation(manifest, tuple(pieces))


def joined(first: Generation, then: Generation, rng: random.Random | None = None) -> Generation:
    """``first`` up to a boundary that both have, the last one or any of them; ``then`` from there on."""
    cuts = [
        piece.info.end
        for piece in first.pieces
        if all(
            other.info.end <= piece.info.end or other.info.start >= piece.info.end for other in then.pieces
        )
    ]
    if not cuts:
        return then
    cut = cuts[-1] if rng is None else rng.choice(cuts)
    chosen = [piece for piece in first.pieces if piece.info.end <= cut]
    chosen += [piece for piece in then.pieces if piece.info.start >= cut]
    pieces = []
    for number, piece in enumerate(chosen, _COMPOSITE_FILE):
        mask = None if piece.mask is None else f"{number:012d}.mask"
        pieces.append(
            replace(piece, info=replace(piece.info, name=f"{number:012d}.segment", mask=mask, keys=None))
        )
    manifest = replace(
        then.manifest, segments=tuple(piece.info for piece in pieces), dirty=(),
        next_file=_COMPOSITE_FILE + len(pieces),
    )  # fmt: skip
    return Generation(manifest, tuple(pieces))


class JoiningRemote(SimRemote):
    """Answers from generations that were put together."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._made: dict[str, Generation] = {}

    def _make(self, pinned: Pinned, made: Generation) -> Pinned:
        self._master.source.take_back(pinned.id)
        self._made[pinned.id] = made
        return Pinned(pinned.id, made.manifest, pinned.position)

    def _whole(self, pinned: Pinned) -> Generation:
        return whole(self._master.source, pinned.id, pinned.manifest)

    def _bytes(self, pin: str, segment: int, position: int, size: int) -> bytes:
        made = self._made.get(pin)
        if made is None:
            return super()._bytes(pin, segment, position, size)
        return made.pieces[segment].data[position : position + size]

    def mask(self, pin: str, segment: int) -> bytes:
        made = self._made.get(pin)
        mask = None if made is None else made.pieces[segment].mask
        return super().mask(pin, segment) if mask is None else mask


class KeepsOld(JoiningRemote):
    """What the folder held before is kept, the rest is pulled."""

    def pin(self, topic_id: int, number: int, start: int) -> Pinned:
        pinned = super().pin(topic_id, number, start)
        old = self.node.given_up.get((topic_id, number))
        return pinned if old is None else self._make(pinned, joined(old, self._whole(pinned)))


class WithoutPin(JoiningRemote):
    """Each segment is read as it is when it is asked for."""

    def pin(self, topic_id: int, number: int, start: int) -> Pinned:
        pinned = super().pin(topic_id, number, start)
        first = self._whole(pinned)
        self._master.source.take_back(pinned.id)
        for _ in first.pieces:
            self._travel()
        then = super().pin(topic_id, number, start)
        return self._make(then, joined(first, self._whole(then), self._rng))


class GoesOn(JoiningRemote):
    """A pull whose pin broke goes on behind the segments that it has, under another pin."""

    def pin(self, topic_id: int, number: int, start: int) -> Pinned:
        pinned = super().pin(topic_id, number, start)
        key, generation = (topic_id, number), self._whole(pinned)
        had = self.node.had.get(key)
        if had is not None and had.pieces:
            return self._make(pinned, joined(had, generation))
        self._pulling = (key, generation)
        return pinned

    def _bytes(self, pin: str, segment: int, position: int, size: int) -> bytes:
        data = super()._bytes(pin, segment, position, size)
        if pin not in self._made:
            key, generation = self._pulling
            self.node.had[key] = replace(generation, pieces=generation.pieces[: segment + 1])
        return data


class WithoutEnds(SimRemote):
    """Next offsets come from the records that are there: neither from the list nor from horizons."""

    def rows(self, start: int) -> Iterator[list[Any]]:
        return (row for row in super().rows(start) if row[0] != "end")

    def pin(self, topic_id: int, number: int, start: int) -> Pinned:
        pinned = super().pin(topic_id, number, start)
        manifest, end = pinned.manifest, 0
        segments = list(manifest.segments)
        if segments:
            last = segments[-1]
            data = self._bytes(pinned.id, len(segments) - 1, 0, last.bytes)
            end = max(batch.header.last_offset for batch in iterate(data)) + 1
            segments[-1] = replace(last, end=end)
        covers = tuple(pair for pair in manifest.cover_times if pair[0] <= end)
        shorter = replace(manifest, horizon=end, segments=tuple(segments), cover_times=covers, dirty=())
        return Pinned(pinned.id, shorter, pinned.position)


def given_up(node: Node) -> dict[Key, Generation]:
    """The compacted log of a folder that is about to start anew."""
    found = {}
    for topic in list(node.core.catalogue.by_id.values()):
        for number in topic.partitions_in(0):
            given = node.source.give(topic.topic_id, number, 0)
            generation = whole(node.source, given.id, given.manifest)
            node.source.take_back(given.id)
            if generation.pieces:
                found[(topic.topic_id, number)] = generation
    return found
