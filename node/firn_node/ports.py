"""Ports for brokers that keep theirs over many lives."""

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000  # below are those of well-known servers
_TRIES = 1000


def free_ports(host: str, count: int) -> list[int]:
    """Ports of ``host`` that nobody listens on.

    They lie below those that the system gives to outgoing connections, any of which might take a port whose broker is
    down. Between this and their use another server may take one.
    *Errors*: OSError when there are none.
    """
    found: list[int] = []
    with contextlib.ExitStack() as open_ones:
        for port in _candidates(count):
            with contextlib.suppress(OSError):
                server = open_ones.enter_context(socket.create_server((host, port)))
                found.append(int(server.getsockname()[1]))
            if len(found) == count:
                return found
    raise OSError(f"no {count} free ports on {host}")


def _candidates(count: int) -> list[int]:
    """0: any that the system gives, where it keeps hardly any from connections or does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        below = range(_LOWEST, int(_RANGE.read_text().split()[0]))
        if len(below) >= _TRIES:
            return random.SystemRandom().sample(below, _TRIES)
    return [0] * count
