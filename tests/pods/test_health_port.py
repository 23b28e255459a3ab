"""The port for probes answers whatever the event loop does."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest
from pods_kit import probe

from firn_node.server import health
from firn_node.server.health import HealthPort


def run(test: Callable[[HealthPort], Awaitable[None]]) -> None:
    async def scene() -> None:
        port = HealthPort("127.0.0.1", 0)
        try:
            await test(port)
        finally:
            await port.close()

    asyncio.run(scene())


async def ask(port: HealthPort, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(probe, port.address, path)


def stand_still(seconds: float) -> None:
    """Hold up the event loop."""
    time.sleep(seconds)


def test_it_is_alive_but_not_ready_while_a_broker_starts_though_the_loop_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "HANGS_S", 0.05)

    async def test(port: HealthPort) -> None:
        asked = asyncio.get_running_loop().run_in_executor(None, probe, port.address, "/livez")
        stand_still(0.3)
        assert (await asked)[0] == 200
        status, body = await ask(port, "/readyz")
        assert (status, "starting" in body) == (503, True)
        assert (await ask(port, "/metrics"))[0] == 503

    run(test)


def test_a_broker_whose_loop_hangs_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HANGS_S", 0.05)

    async def test(port: HealthPort) -> None:
        port.serving(lambda: None, lambda: b"")
        answers = []
        asked = asyncio.get_running_loop().run_in_executor(None, _until_dead, port.address, answers)
        deadline = time.monotonic() + 60
        while not answers and time.monotonic() < deadline:
            stand_still(0.01)
        await asked
        assert answers[0][0] == 503
        assert "has not turned" in answers[0][1]

    run(test)


def _until_dead(address: str, answers: list[tuple[int, str]]) -> None:
    while (found := probe(address, "/livez"))[0] == 200:
        pass
    answers.append(found)


def test_readiness_gives_its_reason_and_metrics_are_made_on_the_loop() -> None:
    async def test(port: HealthPort) -> None:
        loop = asyncio.get_running_loop()
        why: list[str | None] = ["no replica acts as master"]

        def metrics() -> bytes:
            assert asyncio.get_running_loop() is loop
            return b"firn_ready 0\n"

        port.serving(lambda: why[0], metrics)
        assert await ask(port, "/readyz") == (503, "no replica acts as master\n")
        why[0] = None
        assert await ask(port, "/readyz?verbose") == (200, "ready\n")
        assert await ask(port, "/metrics") == (200, "firn_ready 0\n")
        assert await ask(port, "/healthz") == (200, "alive\n")
        port.starting()
        assert (await ask(port, "/readyz"))[0] == 503

    run(test)


def connected(port: HealthPort, source: str) -> socket.socket:
    host, _, number = port.address.rpartition(":")
    return socket.create_connection((host, int(number)), timeout=60, source_address=(source, 0))


def test_nothing_else_is_served() -> None:
    async def test(port: HealthPort) -> None:
        assert (await ask(port, "/v1/topics"))[0] == 404
        with connected(port, "127.0.0.1") as peer:
            peer.sendall(b"POST /livez HTTP/1.1\r\n\r\n")
            assert (await asyncio.to_thread(peer.recv, 64)).startswith(b"HTTP/1.1 405")

    run(test)


def test_peers_that_say_nothing_are_cut_off_without_holding_up_a_probe() -> None:
    async def test(port: HealthPort) -> None:
        silent = [
            connected(port, f"127.0.0.{number}")
            for number in range(2, 30)
            for _ in range(health.PEER_MAX + 2)
        ]
        assert len(silent) > health.TOTAL_MAX
        for _ in range(3):
            assert (await ask(port, "/livez"))[0] == 200
        assert await asyncio.to_thread(silent[0].recv, 1) == b""
        for each in silent:
            each.close()

    run(test)


def test_a_request_that_trickles_in_has_no_longer_than_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "REQUEST_S", 0.3)

    async def test(port: HealthPort) -> None:
        def trickle() -> None:
            with connected(port, "127.0.0.1") as peer:
                for _ in range(10_000):
                    peer.sendall(b"G")
                    time.sleep(0.02)

        with pytest.raises(OSError):
            await asyncio.to_thread(trickle)
        monkeypatch.setattr(health, "REQUEST_S", 60.0)  # for a whole one of a slow machine
        assert (await ask(port, "/livez"))[0] == 200

    run(test)
