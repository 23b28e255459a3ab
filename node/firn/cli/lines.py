"""The lines that ``produce`` reads: blocks of bytes in, records out, in bounded memory.

A line ends at LF; the last one may lack it. Lines are counted from 1 over the whole input. Keys and values of
``tsv`` are the bytes as they stand: no quoting and no escapes, so neither can hold LF, and a key cannot hold the
separator; ``jsonl`` can carry everything.
"""

import json
from collections.abc import Iterator

from firn import limits
from firn.errors import Invalid
from firn.record import NewRecord, parse_document

# A JSON string takes at most 6 bytes for one (``\u0000``); 64 KiB more for names, tag and queues.
LINE_BYTES_MAX = 6 * (limits.KEY_BYTES_MAX + limits.VALUE_BYTES_MAX + limits.HEADERS_BYTES_MAX) + (64 << 10)


class BadLine(Invalid):
    """A line that is no record; ``number`` is its number."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"line {number}: {why}")
        self.number = number


class LineCutter:
    """Cuts blocks into whole lines. Memory: the block in hand and one unfinished line."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._number = 0

    def feed(self, block: bytes) -> tuple[int, list[bytes]]:
        """The lines that ``block`` completes, and the number of the first of them.

        Errors: BadLine when a line grows past ``LINE_BYTES_MAX``.
        """
        first = self._number + 1
        head, newline, rest = block.rpartition(b"\n")
        if not newline:
            self._keep(block)
            return first, []
        lines = head.split(b"\n")
        if self._parts:
            lines[0] = b"".join(self._parts) + lines[0]
            self._parts, self._size = [], 0
        self._number += len(lines)
        self._keep(rest)
        return first, lines

    def finish(self) -> tuple[int, list[bytes]]:
        """The last line, when it had no newline."""
        last, first = b"".join(self._parts), self._number + 1
        self._parts, self._size = [], 0
        return first, [last] if last else []

    def _keep(self, part: bytes) -> None:
        if not part:
            return
        self._parts.append(part)
        self._size += len(part)
        if self._size > LINE_BYTES_MAX:
            raise BadLine(self._number + 1, f"longer than {LINE_BYTES_MAX} bytes, which no record can be")


def parse_tsv(
    first: int, lines: list[bytes], *, separator: bytes, empty_is_tombstone: bool
) -> Iterator[tuple[bytes, bytes | None]]:
    """Key and value of each line. Errors: BadLine at the first line without separator, after all before it."""
    for number, line in enumerate(lines, first):
        key, found, value = line.partition(separator)
        if not found:
            raise BadLine(
                number,
                f"no separator {separator!r:.20} between key and value; `--key-separator` sets another",
            )
        yield key, (None if empty_is_tombstone and not value else value)


def parse_jsonl(first: int, lines: list[bytes], *, empty_is_tombstone: bool) -> Iterator[NewRecord]:
    """The record of each line. Errors: BadLine at the first that is none, after all before it."""
    for number, line in enumerate(lines, first):
        try:
            record = parse_document(json.loads(line))
        except Invalid as error:
            raise BadLine(number, error.message) from error
        except (ValueError, RecursionError) as error:
            raise BadLine(number, f"not JSON: {error}") from error
        if empty_is_tombstone and record.value == b"":
            record = NewRecord(
                record.key,
                None,
                record.partition,
                record.timestamp,
                record.tag,
                record.headers,
                record.queues,
            )
        yield record
