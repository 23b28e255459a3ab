"""``firn status`` of a whole cluster: real processes for what it asks, plain documents for how it puts them together."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import local_cluster
from engine_kit import run

from firn.cli.tables import print_status
from firn.client.clusterstatus import cluster_status
from firn.errors import Unavailable

FIELDS = [
    "node", "pid", "group", "role", "epoch", "address", "in_sync", "committed_position", "log_start", "log_end",
    "lag_bytes", "lag_seconds", "state", "read_only",
]  # fmt: skip


def test_status_shows_every_replica_from_one_address_and_the_one_that_is_dead(tmp_path: Path) -> None:
    async def story() -> None:
        async with local_cluster(tmp_path, "--restart-after", "0s") as cluster, cluster.client() as client:
            await client.create_topic("t", durability={"minInSync": 1})
            await client.put("t", b"a", b"1")
            rows = await cluster.until(
                lambda rows: all(row["lag_bytes"] == 0 and row["lag_seconds"] == 0 for row in rows),
                "none lags",
            )
            assert [row["node"] for row in rows] == ["firn-0-0", "firn-0-1", "firn-0-2"]
            for row in rows:
                assert [name for name in row if name in FIELDS] == FIELDS
                assert row["reason"] is None
            assert len({row["log_end"] for row in rows}) == 1
            [victim, _] = [row for row in rows if row["role"] == "standby"]
            os.kill(victim["pid"], signal.SIGKILL)
            await cluster.until(
                lambda rows: any(r["state"] == "unreachable" and not r["in_sync"] for r in rows), "it is out"
            )
            await client.put("t", b"a", b"2")
            left = next(row["address"] for row in rows if row["role"] == "master")
            shown = (await cluster.firn("status", address=left)).stdout.decode()
            assert "unreachable" in shown
            found = json.loads((await cluster.firn("status", "-o", "json", address=left)).stdout)
            [dead] = [row for row in found["brokers"] if row["state"] == "unreachable"]
            assert (dead["node"], dead["address"], dead["role"]) == (
                victim["node"],
                victim["address"],
                "none",
            )
            assert victim["address"] in dead["reason"]
            assert dead["lag_bytes"] > 0
            assert dead["lag_seconds"] > 0
            [topic] = found["topics"]
            assert topic["partitions"][0]["latest"] == 2

    run(story())


def document(node: str, role: str, address: str, *, epoch: int = 1, members: tuple[str, ...] = ()) -> Any:
    lag = 0 if role == "master" else None
    rows = [{"node": m, "address": m, "in_sync": True, "lag_bytes": lag, "lag_seconds": lag} for m in members]
    return {
        "brokers": [{"node": node, "group": 0, "role": role, "address": address}],
        "groups": [{"group": 0, "epoch": epoch, "version": epoch, "members": rows}],
        "topics": [{"name": "t", "partitions": [{"partition": 0, "latest": 5 if role == "master" else 3}]}],
        "security": {"tls": False, "authentication": False, "problem": None},
    }


def asked(answers: dict[str, Any], *addresses: str) -> tuple[Any, list[str]]:
    order: list[str] = []

    async def ask(address: str) -> Any:
        order.append(address)
        if address not in answers:
            raise Unavailable(f"{address}: cannot be asked")
        return answers[address]

    return asyncio.run(cluster_status(addresses, ask)), order


def test_brokers_that_only_others_know_are_asked_too_and_each_once() -> None:
    answers = {
        "a:1": document("a", "standby", "a:1", members=("a:1", "b:1")),
        "b:1": document("b", "master", "b:1", epoch=2, members=("a:1", "b:1", "c:1")),
    }
    found, order = asked(answers, "a:1")
    assert order == ["a:1", "b:1", "c:1"]
    assert [(row["node"], row["role"]) for row in found["brokers"]] == [
        ("a", "standby"), ("b", "master"), ("c:1", "none"),
    ]  # fmt: skip
    assert [group["epoch"] for group in found["groups"]] == [2]
    assert found["topics"][0]["partitions"] == [{"partition": 0, "latest": 5}]


def test_a_broker_that_nobody_knows_and_that_does_not_answer_is_a_row_of_its_address() -> None:
    found, _ = asked({"a:1": document("a", "master", "a:1", members=("a:1",))}, "a:1", "z:1")
    [row] = [row for row in found["brokers"] if row["address"] == "z:1"]
    assert (row["node"], row["state"], row["reason"]) == (None, "unreachable", "z:1: cannot be asked")


def test_without_any_answer_the_first_brokers_error_is_told() -> None:
    with pytest.raises(Unavailable, match="a:1: cannot be asked"):
        asked({}, "a:1", "b:1")


def test_a_rebuild_and_a_lag_are_shown_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    rebuild = {
        "phase": "files", "partitions": 4, "partitions_done": 1, "bytes": 1 << 20, "bytes_expected": 3 << 20,
        "reason": None,
    }  # fmt: skip
    found = document("a", "none", "a:1")
    found["brokers"][0] |= {"lag_bytes": 2048, "lag_seconds": 1.25, "rebuild": rebuild}
    print_status(found)
    shown = capsys.readouterr().out
    assert "rebuild: files, 1 of 4 partitions, 1.0 MiB of 3.0 MiB" in shown
    assert "2.0 KiB, 1.2 s" in shown
