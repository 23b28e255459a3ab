"""The blocking client's calls: whoever stops waiting ends the work, and nobody waits for ever. No broker answers here."""

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from firn.client import blocking
from firn.errors import FirnError, Unavailable


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _tasks(client: blocking.Client) -> list[str]:
    """What the client's loop still works on."""

    async def named() -> list[str]:
        return [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return client._run(named())


def _is_ended(client: blocking.Client, name: str) -> bool:
    """Whether nothing of this name is worked on, in a while."""
    deadline = time.monotonic() + 30
    while any(name in task for task in _tasks(client)):
        if time.monotonic() > deadline:
            return False
    return True


def test_a_call_that_is_not_waited_for_any_longer_is_given_up(nobody: str) -> None:
    with blocking.Client(nobody, timeout=600) as client:
        producer = client.producer("t", linger_ms=0)
        with pytest.raises(TimeoutError):
            producer.send(b"k", b"v").result(timeout=0.05)
        with pytest.raises(TimeoutError):
            producer.send(b"k", b"v").result(timeout=-1.0)
        assert _is_ended(client, "Chunk.wait")
        producer.abort()


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_a_call_and_the_client_goes_on(nobody: str) -> None:
    with blocking.Client(nobody, timeout=600) as client:
        main = threading.main_thread().ident
        assert main is not None

        def interrupt_who_waits() -> None:
            while sys._current_frames()[main].f_code is not blocking._Call.result.__code__:
                time.sleep(0.01)
            time.sleep(0.1)  # it has come from the first line of that to the one that waits
            signal.pthread_kill(main, signal.SIGINT)

        interrupt = threading.Thread(target=interrupt_who_waits)
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            client.describe("t")
        interrupt.join()
        assert _is_ended(client, "Client.describe")


def test_a_thread_that_waits_when_the_client_is_closed_is_told_so(nobody: str) -> None:
    client = blocking.Client(nobody, timeout=600)
    told: list[Any] = []

    def ask() -> None:
        try:
            client.describe("t")
        except (CancelledError, FirnError) as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not any("Client.describe" in name for name in _tasks(client)):
        pass
    client.close()
    asking.join(60)
    assert len(told) == 1
    with pytest.raises(Unavailable):
        client.describe("t")


def test_an_error_of_a_call_is_raised_where_it_was_called() -> None:
    with blocking.Client("127.0.0.1:1", timeout=0.2) as client, pytest.raises(FirnError):
        client.describe("t")
