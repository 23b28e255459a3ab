"""What a job says at its end: one JSON object, or a table with a few sentences below it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.cli.tables import number_text, print_table

KEYS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Report:
    """``columns`` as ``firn.cli.tables`` takes them; ``failure``: the sentence of a job that did not end well; ``code``: the
    exit code without one, not 0 where the job was ended before it was done.
    """

    document: Mapping[str, Any]
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[object]]
    sentences: Sequence[str] = field(default=())
    failure: str | None = None
    code: int = 0


def print_table_of(report: Report) -> None:
    """For people: the rows, then the sentences."""
    if report.rows:
        print_table(
            report.columns,
            ([number_text(cell) if isinstance(cell, int) else cell for cell in row] for row in report.rows),
        )
    for sentence in report.sentences:
        print(sentence, flush=True)


def key_text(key: bytes) -> str:
    """A key for people and JSON: its text, or, where it is none, its bytes in hex."""
    try:
        text = bytes(key).decode()
    except UnicodeDecodeError:
        text = ""
    return text if text.isprintable() and (text or not key) else "0x" + bytes(key).hex()


def keys_text(keys: Iterable[bytes], total: int) -> str:
    """The first keys of ``total``: ``a, b and 3 more``."""
    shown = [key_text(key) or "''" for key in keys][:KEYS_SHOWN]
    rest = total - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest > 0 else "")
