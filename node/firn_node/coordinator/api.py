"""The coordinator keeps one record per broker group and changes it by compare-and-set alone.

What every implementation keeps (``tests/coordinator`` holds each to it):

- a change is applied whole or not at all, and at most one change is ever applied to one version;
- ``read`` is consistent: it sees every change that was answered ``Done`` before it began;
- a ``Done`` change survives the end of any process, and of the machine where the implementation stores durably;
- a handle never gives a version older than one that it gave before; it says ``Unusable`` instead;
- ``watch`` may leave out versions, never the newest one.

Not knowing is a normal answer. A swap may be applied after it was answered ``Unknown``, and ``Refused`` does not
prove that an *earlier*, unanswered try of the same caller failed: only a version above the expected one, read,
settles a request (rule 1 of ``docs/replication.md``). So all of this is in the types of the answers; exceptions are
left to bugs.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from firn.errors import InvariantBroken
from firn_node.replication.record import GroupId, GroupRecord, check_change


@dataclass(frozen=True, slots=True)
class Found:
    record: GroupRecord


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no record of this group: only a node with an empty log may create it."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No answer was to be had in time: ask again. Nothing is known."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """What is stored cannot be trusted: damaged, missing, or older than what was there. A person must look."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The change is applied and durable."""

    record: GroupRecord


@dataclass(frozen=True, slots=True)
class Refused:
    """This try was not applied: another version was there (None: no record)."""

    found: GroupRecord | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """The change was applied, or will be, or never will."""

    reason: str


Reading = Found | Absent | Unreachable | Unusable
Swap = Done | Refused | Unknown | Unusable


class Coordinator(Protocol):
    """One process's handle. Every answer comes within a bounded time, and no call holds up the event loop."""

    async def read(self, group_id: GroupId) -> Reading:
        """The newest record, consistently."""
        ...

    def watch(self, group_id: GroupId, *, late_s: float = 0.0) -> AsyncGenerator[Reading, None]:
        """What ``read`` would answer, at once and then whenever it changes, soon after; ends with its ``aclose``.

        ``late_s``: so late it may be told of a change, where looking for one costs something.
        """
        ...

    async def compare_and_set(self, new: GroupRecord, *, expected_version: int) -> Swap:
        """Store ``new`` if the newest version is ``expected_version`` (0: no record).

        Errors: InvariantBroken when ``new`` cannot follow that version, whatever is stored: a bug of the caller.
        """
        ...

    async def close(self) -> None:
        """Give back what the handle holds; may be repeated. Swaps under way may still be applied."""
        ...


@dataclass(slots=True)
class Seen:
    """The newest version of each group that a handle has met."""

    versions: dict[GroupId, int] = field(default_factory=dict)

    def meet(self, group_id: GroupId, found: GroupRecord | None) -> str | None:
        """Note what is stored now; why it cannot follow what was met before, None when it can."""
        seen, version = self.versions.get(group_id, 0), 0 if found is None else found.version
        if version < seen:
            return (
                f"group {group_id}: version {seen} was there, now {version or 'no record'}: "
                "an older copy was put back"
            )
        self.versions[group_id] = version
        return None


def decide(found: GroupRecord | None, new: GroupRecord, expected_version: int) -> Refused | None:
    """None when ``new`` may take the place of ``found``.

    Errors: InvariantBroken, also for a change that no node may ask for; nothing is stored then.
    """
    if new.version != expected_version + 1:
        raise InvariantBroken(f"{new.group_id}: version {new.version} cannot follow {expected_version}")
    if (0 if found is None else found.version) != expected_version:
        return Refused(found)
    check_change(found, new)
    return None
