"""The group record: its document, and what may never be in one."""

import json
from dataclasses import replace

import pytest

from firn.errors import Corrupt, InvariantBroken
from firn.types import Epoch
from firn_node.replication.record import (
    GroupId,
    GroupRecord,
    Incarnation,
    LogId,
    Master,
    Member,
    broken_by_change,
    broken_invariants,
    check_change,
    from_document,
)

A, B, C = LogId("a"), LogId("b"), LogId("c")
MEMBERS = {log_id: Member(f"node-{i}", f"127.0.0.1:{7000 + i}", i) for i, log_id in enumerate((A, B, C))}
RECORD = GroupRecord(
    group_id=GroupId("orders-0"),
    version=7,
    epoch=Epoch(3),
    renewals=5,
    master=Master(A, Incarnation("i1")),
    in_sync=frozenset({A, B}),
    members=MEMBERS,
)
RESIGNED = replace(RECORD, version=8, master=None, successor=B)


@pytest.mark.parametrize("record", [RECORD, RESIGNED, replace(RECORD, forced_epoch=Epoch(2))])
def test_a_record_survives_its_json_document(record: GroupRecord) -> None:
    assert from_document(json.loads(json.dumps(record.to_document()))) == record


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": 2}, "format 2"),
        ({"epoch": "3"}, "epoch"),
        ({"version": True}, "version"),
        ({"master": "a"}, "master"),
        ({"master": {"log_id": "a"}}, "incarnation"),
        ({"in_sync": [1]}, "expected a name"),
        ({"members": {"a": {"node": "n"}}}, "address"),
        ({"in_sync": ["b"]}, "has its master in sync"),
        ({"in_sync": ["a", "z"]}, "has only members in sync"),
    ],
)
def test_a_damaged_document_is_refused_by_name(change: dict[str, object], word: str) -> None:
    with pytest.raises(Corrupt, match=word):
        from_document({**RECORD.to_document(), **change})


@pytest.mark.parametrize("name", sorted(RECORD.to_document()))
def test_a_document_without_a_field_is_refused(name: str) -> None:
    document = RECORD.to_document()
    del document[name]
    with pytest.raises(Corrupt):
        from_document(document)


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_what_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(Corrupt):
        from_document(document)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (replace(RECORD, version=0), "is numbered from one"),
        (replace(RECORD, in_sync=frozenset(), master=None), "has someone in sync"),
        (replace(RECORD, in_sync=frozenset({B})), "has its master in sync"),
        (replace(RECORD, in_sync=frozenset({A, LogId("z")})), "has only members in sync"),
        (replace(RECORD, successor=B), "has a successor only after resignation"),
        (replace(RESIGNED, successor=C), "has a successor only after resignation"),
        (replace(RECORD, forced_epoch=Epoch(4)), "was forced in a known epoch"),
    ],
)
def test_each_broken_record_invariant_is_named(record: GroupRecord, name: str) -> None:
    assert broken_invariants(record) == [name]


NEXT = replace(RECORD, version=8)


@pytest.mark.parametrize(
    ("new", "name"),
    [
        (replace(NEXT, group_id=GroupId("other")), "keeps the group"),
        (replace(NEXT, version=9), "is the next version"),
        (replace(NEXT, renewals=4), "never counts back"),
        (replace(NEXT, master=Master(A, Incarnation("i2"))), "changes master by election or resignation"),
        (replace(NEXT, epoch=Epoch(5)), "changes master by election or resignation"),
        (replace(NEXT, epoch=Epoch(4), master=None), "changes master by election or resignation"),
        (replace(NEXT, epoch=Epoch(4), in_sync=frozenset({A, B, C})), "elects from the in sync set"),
    ],
)
def test_each_broken_change_invariant_is_named(new: GroupRecord, name: str) -> None:
    assert name in broken_by_change(RECORD, new)


@pytest.mark.parametrize(
    "new",
    [
        replace(NEXT, renewals=6),
        replace(NEXT, in_sync=frozenset({A, B, C})),
        replace(NEXT, in_sync=frozenset({A})),
        RESIGNED,
        replace(NEXT, epoch=Epoch(4), master=Master(B, Incarnation("i9")), in_sync=frozenset({B})),
        replace(
            NEXT,
            epoch=Epoch(4),
            forced_epoch=Epoch(4),
            master=Master(C, Incarnation("i9")),
            in_sync=frozenset({C}),
        ),
    ],
)
def test_what_the_rules_ask_for_is_a_legal_change(new: GroupRecord) -> None:
    check_change(RECORD, new)


def test_a_first_record_has_version_one() -> None:
    check_change(None, replace(RECORD, version=1))
    with pytest.raises(InvariantBroken, match="version 1"):
        check_change(None, RECORD)
