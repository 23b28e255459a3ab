"""What a forced compaction has to agree with: the statements that Spark has made, by the real key bytes, of its rows.

Of the rows below ``plan_end`` that Spark has seen and that are still served here, those that the key indexes call
superseded must be exactly those that Spark calls dead. A row that Spark has not seen was masked by the replica that it
read; one that is masked here already says nothing. A row whose time as a tombstone is over is not superseded.

Where the horizon is past ``plan_end`` already, a row that is still served has no newer one below the horizon, so Spark
must not call it dead either: the same comparison, and nothing is left to decide.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from firn.errors import Corrupt, Invalid
from firn.statement import BITS_BYTES, BLOCK_OFFSETS, Block, Statement, parse
from firn_node.compaction.decide import Decision, Source
from firn_node.compaction.mask import rows_of
from firn_node.compaction.view import SegmentView
from firn_node.disk import Disk, File

FIRST_OFFSETS = 10  # of a disagreement, to be told
Flags = NDArray[np.bool_]


class Disagreement(Exception):
    """Spark and the key indexes do not call the same rows superseded: nothing may be changed."""


@dataclass(slots=True)
class Agreement:
    """The statements about one partition, and what came of the comparison with them."""

    disk: Disk
    paths: Sequence[str]  # of all slices
    plan_end: int
    compared: int = 0  # rows
    differences: int = 0
    offsets: list[int] = field(default_factory=list)  # of the first differences

    def check(
        self,
        segments: Sequence[SegmentView],
        sources: Sequence[Source],
        decision: Decision,
        *,
        horizon: int,
        dirty_base: int,
        check: Callable[[], None],
    ) -> None:
        """Compare everything. ``sources``: those of the segments first; ``dirty_base``: bit of the horizon's row.

        *Errors*: Disagreement; Corrupt for a statement or a batch that is damaged; what ``check`` raises.
        """
        self.compared = self.differences = 0
        self.offsets = []
        with contextlib.ExitStack() as files:
            said = _Said(merged([self._open(path, files) for path in self.paths]))
            for segment, source in zip(segments, sources, strict=False):
                self._check_segment(said, segment, source.base, decision, check)
            self._check_dirty(said, horizon, dirty_base, decision, check)
            said.finish()
        if self.differences:
            named = ", ".join(map(str, self.offsets))
            raise Disagreement(
                f"Spark and the key index disagree on {self.differences} of {self.compared} rows, the first at offsets "
                f"{named}: a damaged key index, or two keys of one fingerprint; nothing was changed, run `firn verify`"
            )

    def _open(self, path: str, files: contextlib.ExitStack) -> Statement:
        file: File = self.disk.open(path)
        files.callback(file.close)
        try:
            return parse(file.pread, file.size())
        except Invalid as error:
            raise Corrupt(f"{path}: {error.message}", file=path) from error

    def _check_segment(
        self,
        said: "_Said",
        segment: SegmentView,
        base: int,
        decision: Decision,
        check: Callable[[], None],
    ) -> None:
        """The rows of a clean segment that its mask leaves."""
        entries, mask = segment.reader.batches, segment.mask
        for number in range(len(entries)):
            check()
            entry = entries[number]
            first, rows = int(entry["first_row"]), int(entry["rows"])
            if int(entry["first_offset"]) >= self.plan_end:
                return
            offsets = segment.reader.offsets(number)
            kept = offsets < self.plan_end
            if mask is not None:
                kept &= ~rows_of(mask, first, first + rows)
            self._compare(said, offsets[kept], _superseded(decision, base + first, rows)[kept])

    def _check_dirty(
        self,
        said: "_Said",
        horizon: int,
        dirty_base: int,
        decision: Decision,
        check: Callable[[], None],
    ) -> None:
        """Every offset from the horizon to the plan's end has a row, and all of them are served."""
        at = horizon
        while at < self.plan_end:
            check()
            end = min((at // BLOCK_OFFSETS + 1) * BLOCK_OFFSETS, self.plan_end)
            superseded = _superseded(decision, dirty_base + at - horizon, end - at)
            self._compare(said, np.arange(at, end), superseded)
            at = end

    def _compare(self, said: "_Said", offsets: NDArray[np.int64], superseded: Flags) -> None:
        numbers = offsets >> 16
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(offsets)], strict=True):
            part = offsets[start:end]
            seen, dead = said.of(int(numbers[start]), part & (BLOCK_OFFSETS - 1))
            wrong = seen & (dead != superseded[start:end])
            self.compared += int(np.count_nonzero(seen))
            if wrong.any():
                self.differences += int(np.count_nonzero(wrong))
                self.offsets += part[wrong][: FIRST_OFFSETS - len(self.offsets)].tolist()


def merged(statements: Sequence[Statement]) -> Iterator[Block]:
    """The blocks of all slices as one, ascending. *Errors*: Corrupt for two slices that speak of one offset."""
    walks = [walk for walk in (_walk(statement) for statement in statements) if walk.block is not None]
    while walks:
        number = min(walk.number for walk in walks)
        seen, dead = np.zeros(BITS_BYTES, np.uint8), np.zeros(BITS_BYTES, np.uint8)
        for walk in walks:
            block = walk.block
            if block is None or block.number != number:
                continue
            if (seen & block.seen).any():
                raise Corrupt(f"statements: two slices speak of one offset in block {number}")
            seen |= block.seen
            dead |= block.dead
            walk.advance()
        yield Block(number, seen, dead)
        walks = [walk for walk in walks if walk.block is not None]


@dataclass(slots=True)
class _Walk:
    """The blocks of one slice, and where it is among them."""

    rest: Iterator[Block]
    block: Block | None = None

    @property
    def number(self) -> int:
        return -1 if self.block is None else self.block.number

    def advance(self) -> None:
        try:
            self.block = next(self.rest, None)
        except Invalid as error:
            raise Corrupt(f"a statement is damaged: {error.message}") from error


def _walk(statement: Statement) -> _Walk:
    walk = _Walk(statement.blocks())
    walk.advance()
    return walk


class _Said:
    """What was said, asked for in the order of offsets."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks = blocks
        self._block = next(blocks, None)

    def of(self, number: int, places: NDArray[np.int64]) -> tuple[Flags, Flags]:
        """Whether each place of a block was seen, and whether it is dead."""
        while self._block is not None and self._block.number < number:
            self._block = next(self._blocks, None)
        block = self._block
        if block is None or block.number != number:
            none = np.zeros(len(places), np.bool_)
            return none, none
        byte, bit = places >> 3, (places & 7).astype(np.uint8)
        seen = (block.seen[byte] >> bit & 1).astype(np.bool_)
        return seen, (block.dead[byte] >> bit & 1).astype(np.bool_)

    def finish(self) -> None:
        """Read to the end: what is damaged there was found too."""
        for _ in self._blocks:
            pass


def _superseded(decision: Decision, start: int, rows: int) -> Flags:
    """Of bits that no mask held before."""
    dead = rows_of(decision.dead, start, start + rows)
    return dead & ~rows_of(decision.over, start, start + rows)
