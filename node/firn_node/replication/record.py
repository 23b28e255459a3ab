"""The group record: the one small thing that a group's safety rests on, changed only by compare-and-set.

It is kept by a coordinator (``firn_node.coordinator``) as the JSON document that ``to_document`` makes:

============== ====================================== ==================================================
field          type                                   note
============== ====================================== ==================================================
format         1                                      a newer one is refused by name
group_id       text                                   never changes; a node refuses a record of another
version        int, from 1                            grows by one with each change; 0: no record yet
epoch          int, from 1                            number of the mastership; grows by one at an election
renewals       int                                    counted up by the master: the lease is this record
master         {log_id, incarnation} or null          null: the last one resigned, in-sync nodes may stand
successor      log_id or null                         who stands first after a resignation; null with a master
in_sync        list of log_ids, sorted                the nodes that have everything that was committed
members        {log_id: {node, address, ordinal}}     all replicas; a lower ordinal stands first
forced_epoch   int                                    newest epoch elected by accepted data loss; 0: none
============== ====================================== ==================================================

Invariants of a record: ``RECORD_INVARIANTS``; of a change: ``CHANGE_INVARIANTS``; each a named predicate.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

from firn.errors import Corrupt, InvariantBroken
from firn.types import Epoch

FORMAT = 1
NO_VERSION = 0  # the version that a compare-and-set expects to create a record
NEVER_FORCED = Epoch(0)

GroupId = NewType("GroupId", str)
LogId = NewType("LogId", str)  # random name of a data folder: a lost disk is a new replica
Incarnation = NewType("Incarnation", str)  # random name of a process start


@dataclass(frozen=True, slots=True)
class Master:
    log_id: LogId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Member:
    node: str
    address: str
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class GroupRecord:
    group_id: GroupId
    version: int
    epoch: Epoch
    renewals: int
    master: Master | None
    in_sync: frozenset[LogId]
    members: Mapping[LogId, Member] = field(hash=False)
    successor: LogId | None = None
    forced_epoch: Epoch = NEVER_FORCED

    def to_document(self) -> dict[str, Any]:
        """The record as JSON values; ``from_document`` gives the same record back."""
        master = self.master
        return {
            "format": FORMAT,
            "group_id": self.group_id,
            "version": self.version,
            "epoch": self.epoch,
            "renewals": self.renewals,
            "master": master and {"log_id": master.log_id, "incarnation": master.incarnation},
            "successor": self.successor,
            "in_sync": sorted(self.in_sync),
            "members": {
                log_id: {"node": m.node, "address": m.address, "ordinal": m.ordinal}
                for log_id, m in sorted(self.members.items())
            },
            "forced_epoch": self.forced_epoch,
        }


def from_document(document: Any) -> GroupRecord:
    """The record that a document holds, checked. *Errors*: Corrupt names what is wrong with it."""
    if not isinstance(document, dict):
        raise Corrupt(f"group record: expected an object, found {type(document).__name__}")
    if document.get("format") != FORMAT:
        raise Corrupt(f"group record: format {document.get('format')!r} is unknown, this firn reads {FORMAT}")
    try:
        record = GroupRecord(
            group_id=GroupId(_typed(document, "group_id", str)),
            version=_typed(document, "version", int),
            epoch=Epoch(_typed(document, "epoch", int)),
            renewals=_typed(document, "renewals", int),
            master=_master(document["master"]),
            successor=None if document["successor"] is None else LogId(_typed(document, "successor", str)),
            in_sync=frozenset(LogId(_text(name)) for name in _typed(document, "in_sync", list)),
            members={LogId(k): _member(m) for k, m in _typed(document, "members", dict).items()},
            forced_epoch=Epoch(_typed(document, "forced_epoch", int)),
        )
    except KeyError as error:
        raise Corrupt(f"group record: field {error.args[0]} is missing") from None
    except TypeError as error:
        raise Corrupt(f"group record: {error}") from None
    if broken := broken_invariants(record):
        raise Corrupt(f"group record of {record.group_id}, version {record.version}: {', '.join(broken)}")
    return record


def _typed(document: dict[str, Any], name: str, kind: type) -> Any:
    value = document[name]
    if type(value) is not kind:
        raise TypeError(f"{name}: expected {kind.__name__}, found {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a name, found {value!r}")
    return value


def _master(document: Any) -> Master | None:
    if document is None:
        return None
    if not isinstance(document, dict):
        raise TypeError(f"master: expected an object, found {document!r}")
    log_id, incarnation = _typed(document, "log_id", str), _typed(document, "incarnation", str)
    return Master(LogId(log_id), Incarnation(incarnation))


def _member(document: Any) -> Member:
    if not isinstance(document, dict):
        raise TypeError(f"member: expected an object, found {document!r}")
    node, address = _typed(document, "node", str), _typed(document, "address", str)
    return Member(node, address, _typed(document, "ordinal", int))


# What holds of every record.


def is_numbered_from_one(record: GroupRecord) -> bool:
    return record.version >= 1 and record.epoch >= 1 and record.renewals >= 0


def has_someone_in_sync(record: GroupRecord) -> bool:
    return bool(record.in_sync)


def has_its_master_in_sync(record: GroupRecord) -> bool:
    return record.master is None or record.master.log_id in record.in_sync


def has_only_members_in_sync(record: GroupRecord) -> bool:
    return record.in_sync <= record.members.keys()


def has_a_successor_only_after_resignation(record: GroupRecord) -> bool:
    return record.successor is None or (record.master is None and record.successor in record.in_sync)


def was_forced_in_a_known_epoch(record: GroupRecord) -> bool:
    return 0 <= record.forced_epoch <= record.epoch


RECORD_INVARIANTS: tuple[Callable[[GroupRecord], bool], ...] = (
    is_numbered_from_one,
    has_someone_in_sync,
    has_its_master_in_sync,
    has_only_members_in_sync,
    has_a_successor_only_after_resignation,
    was_forced_in_a_known_epoch,
)


# What holds of every change from one version to the next.


def keeps_the_group(old: GroupRecord, new: GroupRecord) -> bool:
    return new.group_id == old.group_id


def is_the_next_version(old: GroupRecord, new: GroupRecord) -> bool:
    return new.version == old.version + 1


def never_counts_back(old: GroupRecord, new: GroupRecord) -> bool:
    return new.renewals >= old.renewals and new.forced_epoch >= old.forced_epoch


def changes_master_by_election_or_resignation(old: GroupRecord, new: GroupRecord) -> bool:
    """A new epoch names a master; within an epoch the master stays, or resigns for good."""
    if new.epoch == old.epoch + 1:
        return new.master is not None
    return new.epoch == old.epoch and new.master in (old.master, None)


def elects_from_the_in_sync_set(old: GroupRecord, new: GroupRecord) -> bool:
    """An election takes nobody in; only an accepted data loss, recorded as such, elects from outside."""
    return new.epoch == old.epoch or new.forced_epoch == new.epoch or new.in_sync <= old.in_sync


CHANGE_INVARIANTS: tuple[Callable[[GroupRecord, GroupRecord], bool], ...] = (
    keeps_the_group,
    is_the_next_version,
    never_counts_back,
    changes_master_by_election_or_resignation,
    elects_from_the_in_sync_set,
)


def broken_invariants(record: GroupRecord) -> list[str]:
    """Names of the invariants that a record breaks, in words."""
    return _names(check for check in RECORD_INVARIANTS if not check(record))


def broken_by_change(old: GroupRecord, new: GroupRecord) -> list[str]:
    """Names of the invariants that a change breaks, in words."""
    return _names(check for check in CHANGE_INVARIANTS if not check(old, new))


def check_change(old: GroupRecord | None, new: GroupRecord) -> None:
    """Run before every compare-and-set. *Errors*: InvariantBroken: a bug of who asks."""
    broken = broken_invariants(new)
    if old is not None:
        broken += broken_by_change(old, new)
    elif new.version != 1:
        broken.append("a first record has version 1")
    if broken:
        raise InvariantBroken(f"group record {new.to_document()} after {old and old.version}: {broken}")


def _names(checks: Iterable[Callable[..., bool]]) -> list[str]:
    return [check.__name__.replace("_", " ") for check in checks]
