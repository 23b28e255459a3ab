"""``firn up`` and the other commands with TLS and tokens, as a person uses them."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import time
from pathlib import Path

import pytest
from security_kit import Site

from firn.client import Client, blocking
from firn.errors import Unauthorized
from support.firn_cli.calls import Running, call


def up(data: Path, *options: str) -> Running:
    return Running("up", "--data", str(data), "--listen", "127.0.0.1:0", "--print-ready", *options)


def address(running: Running) -> str:
    line = running.line().decode()
    assert line.startswith("READY 127.0.0.1:"), line + running.stop().stderr.decode()
    return line.split()[1]


def test_a_local_broker_with_its_own_ca_serves_who_has_its_certificates(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data, "--tls") as running:
        where = address(running)
        options = [
            "--tls-ca", f"{data}/tls/ca.crt", "--tls-cert", f"{data}/tls/admin.crt", "--tls-key", f"{data}/tls/admin.key",
        ]  # fmt: skip
        environment = {
            "FIRN_TLS_CA": options[1], "FIRN_TLS_CERT": options[3], "FIRN_TLS_KEY": options[5],
        }  # fmt: skip
        call(*options, "topics", "create", "t", address=where)
        assert (
            call("produce", "t", address=where, input=b"a\t1\n", **environment).stdout
            == b"1 records acknowledged\n"
        )
        assert (
            call(*options, "consume", "t", "--until-end", "--format", "tsv", address=where).stdout
            == b"a\t1\n"
        )
        refused = call("--tls-ca", options[1], "topics", "list", address=where, code=1)
        assert b"who are you?" in refused.stderr
        with blocking.Client(where, tls_ca=options[1], tls_cert=options[3], tls_key=options[5]) as client:
            assert [record.value for record in client.reader("t", until_end=True)] == [b"1"]
            assert client.get("t", b"a").value == b"1"
        assert running.stop().returncode == 0
    lines = [json.loads(line) for line in (data / "audit.log").read_text().splitlines()]
    assert [(line["principal"], line["outcome"]) for line in lines] == [
        ("admin", "done"),
        (None, "unauthorized"),
    ]
    assert b"damaged" not in call("verify", "--data", str(data)).stdout


def test_a_client_leaves_no_connection_open_to_a_broker_that_does_not_answer(tmp_path: Path) -> None:
    """Python warns of one that is open when it is forgotten, and a warning fails a test."""

    async def leave_when_silent(running: Running, where: str) -> None:
        files = {"tls_ca": "ca.crt", "tls_cert": "admin.crt", "tls_key": "admin.key"}
        async with Client(
            where, **{name: f"{tmp_path}/tls/{file}" for name, file in files.items()}
        ) as client:
            await client.create_topic("t")
            await client.put("t", b"a", b"1")
            os.kill(running.process.pid, signal.SIGSTOP)

    with up(tmp_path, "--tls") as running:
        try:
            asyncio.run(leave_when_silent(running, address(running)))
            gc.collect()
        finally:
            os.kill(running.process.pid, signal.SIGCONT)


def test_a_local_cluster_with_its_own_ca_outlives_its_master(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data, "--tls", "--replicas", "2", "--lease-ttl", "3s", "--restart-after", "200ms") as running:
        line = running.line().decode()
        assert line.startswith("READY 127.0.0.1:"), line + running.stop().stderr.decode()
        where = line.split()[1]
        environment = {
            "FIRN_TLS_CA": f"{data}/tls/ca.crt", "FIRN_TLS_CERT": f"{data}/tls/admin.crt",
            "FIRN_TLS_KEY": f"{data}/tls/admin.key",
        }  # fmt: skip
        call("topics", "create", "t", "--set", "durability.minInSync=1", address=where, **environment)
        assert call("produce", "t", address=where, input=b"a\t1\n", **environment).stdout.startswith(
            b"1 records"
        )
        for _ in range(2):  # whoever is master ends, the other one has what was acknowledged
            os.kill(master_of(where, environment), signal.SIGKILL)
            assert call("get", "t", "a", address=where, **environment).stdout.strip() == b"1"
        refused = call("topics", "list", address=where, code=1, FIRN_TLS_CA=environment["FIRN_TLS_CA"])
        assert b"who are you?" in refused.stderr
        assert running.stop().returncode == 0


def master_of(where: str, environment: dict[str, str]) -> int:
    """The process id of the master, once all are in sync."""
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                blocking.Client(
                    address,
                    tls_ca=environment["FIRN_TLS_CA"],
                    tls_cert=environment["FIRN_TLS_CERT"],
                    tls_key=environment["FIRN_TLS_KEY"],
                )
            )
            for address in where.split(",")
        ]
        while True:
            rows = [client.status()["brokers"][0] for client in clients]
            masters = [row["pid"] for row in rows if row["role"] == "master"]
            if len(masters) == 1 and all(row["in_sync"] for row in rows):
                return int(masters[0])
            time.sleep(0.05)


def test_groups_of_a_cluster_with_tls_take_over_topics_from_group_0(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data, "--tls", "--groups", "2", "--lease-ttl", "1500ms") as running:
        where = address(running)
        environment = {
            "FIRN_TLS_CA": f"{data}/tls/ca.crt", "FIRN_TLS_CERT": f"{data}/tls/admin.crt",
            "FIRN_TLS_KEY": f"{data}/tls/admin.key",
        }  # fmt: skip
        call("topics", "create", "t", "--partitions", "2", address=where, **environment)
        rows = b"".join(b"%d\tv\n" % number for number in range(20))
        assert call("produce", "t", address=where, input=rows, **environment).stdout.startswith(b"20 records")
        read = call("consume", "t", "--until-end", address=where, **environment).stdout.splitlines()
        assert {json.loads(line)["partition"] for line in read} == {0, 1}
        assert len(read) == 20
        assert running.stop().returncode == 0


def test_tokens_are_made_by_a_command_and_taken_back_without_a_restart(tmp_path: Path) -> None:
    site = Site(tmp_path)
    made = call("token", "ops", "--admin")
    token, entry = made.stdout.decode().strip(), made.stderr.decode().split("\n", 1)[1]
    assert token not in entry
    Path(site.path("tokens.yaml")).write_text(f"tokens:\n{entry}")
    Path(site.path("token")).write_text(token)
    flags = [
        "--tls-cert",
        site.path("node.crt"),
        "--tls-key",
        site.path("node.key"),
        "--tokens",
        site.path("tokens.yaml"),
    ]
    with up(tmp_path / "data", *flags) as running:
        where = address(running)
        options = ["--tls-ca", site.path("ca.crt"), "--token-file", site.path("token")]
        call(*options, "topics", "create", "t", address=where)
        with blocking.Client(where, tls_ca=site.path("ca.crt"), token=token) as client:
            assert [topic["name"] for topic in client.topics()] == ["t"]
            site.write("tokens.yaml", b"tokens: []\n")
            with pytest.raises(Unauthorized):
                ask_until_refused(client)
        environ = Path(f"/proc/{running.process.pid}/cmdline").read_bytes()
        assert token.encode() not in environ
        ended = running.stop()
    assert token.encode() not in ended.stderr


def ask_until_refused(client: blocking.Client) -> None:
    """Until the broker has looked at its files again. Errors: Unauthorized."""
    while True:
        client.topics()
        time.sleep(0.05)


def test_a_broker_does_not_start_with_files_that_are_no_good(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for flags, said in (
        (["--tls-cert", site.path("node.crt")], b"tlsKey belong together"),
        (["--tls-cert", site.path("node.crt"), "--tls-key", site.path("ca.crt")], b"node.crt"),
        (["--tokens", site.path("none.yaml")], b"none.yaml"),
    ):
        with up(tmp_path / "data", *flags) as running:
            ended = running.end()
        assert ended.returncode in (1, 2)
        assert said in ended.stderr
    with up(tmp_path / "data", "--tls", "--tls-ca", site.path("ca.crt")) as running:
        ended = running.end()
    assert ended.returncode == 2
    assert os.listdir(tmp_path / "data") == [] or not (tmp_path / "data" / "tls").exists()
