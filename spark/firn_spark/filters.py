"""What of a query's conditions the data source takes on: fewer partitions, narrower offsets, keys looked up, rows left out.

Every condition is handed back to Spark as well, which looks at what is left: so none can be taken on wrongly, only in
vain. Comparisons with null come to nothing, as in SQL.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

_MIN, _MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from ``low`` to ``high``, both included."""

    low: int = _MIN
    high: int = _MAX

    @property
    def is_all(self) -> bool:
        return self.low == _MIN and self.high == _MAX

    def meet(self, low: int = _MIN, high: int = _MAX) -> "Span":
        return Span(max(self.low, low), min(self.high, high))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows that satisfy all of it. ``timestamp`` in us since 1970; ``keys``: None is any."""

    partition: Span = Span()
    offset: Span = Span()
    timestamp: Span = Span()
    keys: frozenset[bytes] | None = None

    @property
    def is_all(self) -> bool:
        spans = (self.partition, self.offset, self.timestamp)
        return self.keys is None and all(span.is_all for span in spans)

    def rows_of(self, batch: Any) -> Any:
        """The rows of a record batch that are wanted."""
        keep = None
        for name, span in (("offset", self.offset), ("timestamp", self.timestamp)):
            if span.is_all:
                continue
            numbers = batch.column(name).cast(pa.int64())
            for test in (pc.greater_equal(numbers, span.low), pc.less_equal(numbers, span.high)):
                keep = test if keep is None else pc.and_(keep, test)
        if self.keys is not None:
            test = pc.is_in(batch.column("key"), value_set=pa.array(sorted(self.keys), pa.binary()))
            keep = test if keep is None else pc.and_(keep, test)
        return batch if keep is None else batch.filter(keep)


def wanted_of(filters: Iterable[Filter]) -> Wanted:
    """What these conditions, all of which hold, leave; those that are not understood leave everything."""
    found = Wanted()
    for each in filters:
        found = _narrowed(found, each)
    return found


def _narrowed(found: Wanted, given: Filter) -> Wanted:
    if not isinstance(
        given, EqualTo | EqualNullSafe | In | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
    ):
        return found
    if len(given.attribute) != 1:
        return found
    column = given.attribute[0]
    if column == "key":
        keys = _keys(given)
        if keys is None:
            return found
        return replace(found, keys=keys if found.keys is None else found.keys & keys)
    if column == "partition":
        return replace(found, partition=_span(given, found.partition))
    if column == "offset":
        return replace(found, offset=_span(given, found.offset))
    if column == "timestamp":
        return replace(found, timestamp=_span(given, found.timestamp))
    return found


def _keys(given: Filter) -> frozenset[bytes] | None:
    values: Sequence[Any]
    if isinstance(given, EqualTo | EqualNullSafe):
        values = [given.value]
    elif isinstance(given, In):
        values = given.value
    else:
        return None
    if not all(isinstance(value, bytes | bytearray) or value is None for value in values):
        return None
    return frozenset(bytes(value) for value in values if value is not None)


def _span(given: Filter, known: Span) -> Span:
    if isinstance(given, In):
        numbers = [_number(value) for value in given.value]
        known_numbers = [n for n in numbers if n is not None]
        if len(known_numbers) != len(numbers) or not known_numbers:
            return known
        return known.meet(min(known_numbers), max(known_numbers))
    number = _number(given.value)  # type: ignore[attr-defined]
    if number is None:
        return known
    if isinstance(given, EqualTo | EqualNullSafe):
        return known.meet(number, number)
    if isinstance(given, GreaterThan):
        return known.meet(low=number + 1)
    if isinstance(given, GreaterThanOrEqual):
        return known.meet(low=number)
    if isinstance(given, LessThan):
        return known.meet(high=number - 1)
    return known.meet(high=number)


def _number(value: Any) -> int | None:
    """A whole number, or a time in us since 1970; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, datetime) and value.tzinfo is not None:
        whole = int(value.replace(microsecond=0).timestamp())
        return whole * 1_000_000 + value.microsecond
    return None
