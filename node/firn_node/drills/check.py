"""Whether what was acknowledged and read fits what a log holds at the end.

What is held, of a log that keeps every raw record for as long as a drill takes:

- an acknowledged record stands in the raw view where it was acknowledged, with its key and value;
- nothing stands there twice, nothing that was never sent, nothing that was refused;
- a producer's records of one partition stand in the order in which they were sent;
- whatever any reader was shown at any time stands there: an offset never changes its record;
- no reader goes back within a partition; a raw reader leaves nothing out;
- the compacted view shows the newest record of every key, at most once; a tombstone's key shows nothing older;
- a reader of the compacted view that came to the end was shown the newest record of every key;
- operations on single keys have an order (``linear``).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from firn_node.drills import linear
from firn_node.drills.history import SESSION, End, History, Pass, Row

STORIES_MAX = 20


@dataclass(slots=True)
class Faults:
    """What is wrong: how often, by kind, and the first stories."""

    counts: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)

    def add(self, kind: str, story: str) -> None:
        self.counts[kind] += 1
        if len(self.stories) < STORIES_MAX:
            self.stories.append(f"{kind}: {story}")


class Checker:
    """Use ``run`` once."""

    def __init__(self, history: History, end: End) -> None:
        self._history = history
        self._end = end
        self._by_place = {(row.partition, row.offset): row for row in end.raw}
        self._by_id: dict[int, Row] = {}
        self._newest: dict[bytes, Row] = {}
        self.faults = Faults()

    def run(self) -> Faults:
        self._check_raw()
        self._check_acknowledged()
        for reading in self._history.passes:
            self._check_pass(reading)
        self._check_view()
        self._check_gets()
        self._check_operations()
        return self.faults

    def _check_raw(self) -> None:
        last: dict[tuple[int, int], int] = {}
        for row in sorted(self._end.raw):
            if row.id in self._by_id:
                self.faults.add("doubled", f"{_place(row)}: {row.id} stands at {_place(self._by_id[row.id])}")
                continue
            self._by_id[row.id] = row
            self._newest[row.key] = row
            self._check_content(row, "raw")
            if row.id in self._history.refused:
                self.faults.add("refused", f"{_place(row)}: {row.id} was refused, and is there")
            session, number = divmod(row.id, SESSION)
            if session in self._history.unordered:
                continue
            if number < last.get((session, row.partition), -1):
                self.faults.add("reordered", f"{_place(row)}: {row.id} stands behind a later one")
            last[session, row.partition] = number

    def _check_content(self, row: Row, where: str) -> None:
        sent = self._history.sent.get(row.id)
        if sent is None:
            self.faults.add("never_sent", f"{where} {_place(row)}: {row}")
        elif sent != (row.key, row.value):
            self.faults.add("changed", f"{where} {_place(row)}: {row}, sent was {sent}")

    def _check_acknowledged(self) -> None:
        for id, place in self._history.acknowledged.items():
            found = self._by_place.get(place)
            if found is None or found.id != id:
                shown = "nothing" if found is None else f"{found.id}"
                elsewhere = f", and it is at {_place(self._by_id[id])}" if id in self._by_id else ""
                self.faults.add(
                    "lost", f"{id} was acknowledged at {place[0]}@{place[1]}, where {shown} is{elsewhere}"
                )

    def _check_pass(self, reading: Pass) -> None:
        """What one reader saw."""
        bounds: dict[int, tuple[int, int]] = {}
        last: dict[bytes, Row] = {}
        for row in reading.rows:
            first, before = bounds.get(row.partition, (row.offset, -1))
            if row.offset <= before:
                self.faults.add("went_back", f"{reading.name}: {_place(row)} behind {before}")
            bounds[row.partition] = (first, row.offset)
            last[row.key] = row
            stands = self._by_place.get((row.partition, row.offset))
            if stands is None or stands.id != row.id:
                kind = "vanished" if stands is None else "changed"
                self.faults.add(
                    kind, f"{reading.name} was shown {row.id} at {_place(row)}, now {stands} is there"
                )
        if reading.view == "raw":
            self._check_nothing_left_out(reading, bounds)
        elif reading.is_whole:
            self._check_newest(reading, last)

    def _check_nothing_left_out(self, reading: Pass, bounds: dict[int, tuple[int, int]]) -> None:
        seen: defaultdict[int, set[int]] = defaultdict(set)
        for row in reading.rows:
            seen[row.partition].add(row.offset)
        for row in self._end.raw:
            first, last = bounds.get(row.partition, (0, -1))
            first = 0 if reading.is_whole else first
            last = row.offset if reading.is_whole else last
            if first <= row.offset <= last and row.offset not in seen[row.partition]:
                self.faults.add("left_out", f"{reading.name} was not shown {row.id} at {_place(row)}")

    def _check_newest(self, reading: Pass, last: dict[bytes, Row]) -> None:
        for key, newest in self._newest.items():
            shown = last.get(key)
            if shown is None and newest.value is None:
                continue
            if shown is None or shown.offset != newest.offset:
                self.faults.add("left_out", f"{reading.name}: {key!r} ends with {shown}, is {newest}")

    def _check_view(self) -> None:
        ends: dict[int, int] = {}
        shown: dict[bytes, Row] = {}
        for row in self._end.view:
            if row.offset <= ends.get(row.partition, -1):
                self.faults.add("went_back", f"compacted {_place(row)} behind {ends[row.partition]}")
            ends[row.partition] = row.offset
            self._check_content(row, "compacted")
            shown[row.key] = row
        for key, newest in self._newest.items():
            self._check_shown(key, newest, shown.get(key), "the compacted view")

    def _check_shown(self, key: bytes, newest: Row, shown: Row | None, where: str) -> None:
        if shown is None:
            if newest.value is not None:
                self.faults.add("missing", f"{key!r} of {_place(newest)} is not in {where}")
        elif shown.offset != newest.offset:
            kind = "resurrected" if newest.value is None and shown.value is not None else "stale"
            self.faults.add(kind, f"{key!r} in {where} is {shown}, should be {newest}")

    def _check_gets(self) -> None:
        for key, shown in self._end.gets.items():
            newest = self._newest.get(key)
            if newest is None:
                if shown is not None:
                    self.faults.add("never_sent", f"get of {key!r} shows {shown}")
            else:
                self._check_shown(key, newest, shown, "what get shows")

    def _check_operations(self) -> None:
        for trouble in linear.check(self._settled(self._history.operations)):
            self.faults.add("not_linearizable" if trouble.is_proof else "undecided", trouble.story)

    def _settled(self, operations: Iterable[linear.Operation]) -> list[linear.Operation]:
        """Unknown writes that stand in the log took effect there; the others never did."""
        found = []
        for each in operations:
            if each.outcome == "unknown" and each.kind == "put" and each.write is not None:
                row = self._by_id.get(each.write)
                if row is None:
                    continue
                each = replace(each, offset=row.offset)
            found.append(each)
        return found


def _place(row: Row) -> str:
    return f"{row.partition}@{row.offset}"


def check(history: History, end: End) -> Faults:
    """Everything that is wrong."""
    return Checker(history, end).run()
