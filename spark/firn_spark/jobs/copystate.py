"""What a copy remembers of itself in its checkpoint folder, and how far behind it is.

::

    CHECKPOINT/copy.json   this state, written beside and renamed
    CHECKPOINT/LOCK        held by the run that is going on: two at once would write old values over new ones
    CHECKPOINT/CUT-OVER    made by a person: end when everything that is written by now has been copied
    CHECKPOINT/changes/    Spark's own checkpoint of the changes

The order that makes a restart right: (1) the state with ``ends``, the ends of the *first* run's snapshot, is durable
before the first record is written to the target; (2) the map is written; (3) phase ``changes``: the raw view is copied
from ``ends`` on. A run that dies before (3) writes the map anew, out of a younger snapshot, and begins with the changes
at the old ends all the same: a key that was deleted between the two snapshots has its tombstone there.
"""

import fcntl
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from firn.errors import Corrupt, Invalid
from firn_spark.streaming import Offsets

Phase = Literal["map", "changes", "done"]
STATE, LOCK, CUT_OVER, CHANGES = "copy.json", "LOCK", "CUT-OVER", "changes"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    source: str
    source_id: int
    target: str
    target_id: int
    key: str
    value: str
    ends: dict[int, int]  # the changes begin here, a partition
    phase: Phase = "map"

    @classmethod
    def read(cls, folder: Path) -> "CopyState | None":
        """None when nothing was begun there. Errors: Corrupt."""
        path = folder / STATE
        try:
            found = json.loads(path.read_bytes())
            found["ends"] = {int(partition): int(end) for partition, end in found["ends"].items()}
            return cls(**found)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"{path}: no state of a copy: {error!r}") from error

    def write(self, folder: Path) -> Self:
        """Effects: durable on return, whole or as it was."""
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{STATE}.new"
        with beside.open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / STATE)
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        return self

    def check_same(self, other: "CopyState", folder: Path) -> None:
        """Errors: Invalid when ``other``, what is asked for now, is not what was begun here."""
        for field in ("source", "source_id", "target", "target_id", "key", "value"):
            mine, asked = getattr(self, field), getattr(other, field)
            if mine != asked:
                raise Invalid(
                    f"{folder} is the checkpoint of another copy: its {field} is {mine!r}, not {asked!r}"
                )


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Be the one run of this checkpoint. Errors: Invalid when there is another."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Invalid(f"{folder}: another run of this copy is going on") from None
        yield


def committed(checkpoint: Path) -> dict[int, int]:
    """The offsets below which a query has written everything; empty before its first micro-batch.

    *Source*: Spark's checkpoint: ``commits/N`` is made when micro-batch N is done, ``offsets/N`` holds its version, its
    settings and, a line each, where its sources end.
    """
    names = [int(path.name) for path in checkpoint.glob("commits/*") if path.name.isdigit()]
    if not names:
        return {}
    try:
        lines = (checkpoint / "offsets" / str(max(names))).read_text().splitlines()
        return dict(Offsets.of(json.loads(lines[2])).offsets)
    except (OSError, ValueError, IndexError) as error:
        raise Corrupt(f"{checkpoint}: no checkpoint of a copy's changes: {error!r}") from error


class Lag:
    """How many seconds the copy is behind: since when the source has had something that is not copied."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[int, int]]] = deque()

    def saw(self, now: float, ends: Mapping[int, int]) -> None:
        """The source's ends at ``now``."""
        self._seen.append((now, dict(ends)))

    def behind(self, now: float, copied: Mapping[int, int]) -> float:
        """Seconds, when everything below ``copied`` has been copied; the time of the newest ends below it counts."""
        while len(self._seen) > 1 and covers(copied, self._seen[1][1]):
            self._seen.popleft()
        if not self._seen:
            return float("inf")
        at, ends = self._seen[0]
        return now - at if covers(copied, ends) else float("inf")


def covers(copied: Mapping[int, int], ends: Mapping[int, int]) -> bool:
    """Whether everything below ``ends`` has been copied."""
    return all(copied.get(partition, 0) >= end for partition, end in ends.items())
