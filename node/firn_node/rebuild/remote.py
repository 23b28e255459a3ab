"""The master, as a standby that is being rebuilt asks it: one connection, used by one thread at a time.

Blocking, because bytes go from the socket to the kernels to the file within one thread; ``close`` from another thread
ends a request that waits.
"""

import contextlib
import http.client
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedIOBase
from ssl import SSLContext
from typing import Any
from urllib.parse import urlencode

import msgpack

from firn.errors import FirnError, Unavailable, from_document
from firn.wire import MSGPACK_TYPE
from firn_node.compaction import manifest as manifests
from firn_node.compaction.manifest import Manifest
from firn_node.replication import PATH

CONNECT_S = 3.0
TIMEOUT_S = 30.0  # without a byte
_READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Where:
    """The master, and how it is reached. ``query``: who asks whom."""

    address: str
    query: Mapping[str, str | int]
    tls: SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pinned:
    id: str
    manifest: Manifest
    position: int


class Remote:
    """*Errors* of all calls: what the master answered; OSError and HTTPException when the connection ends."""

    def __init__(self, where: Where) -> None:
        host, _, port = where.address.rpartition(":")
        self._where = where
        self._is_closed = False
        self._connection: http.client.HTTPConnection
        if where.tls is not None:
            self._connection = http.client.HTTPSConnection(
                host.strip("[]"), int(port), timeout=CONNECT_S, context=where.tls
            )
        else:
            self._connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=CONNECT_S)

    def rows(self, start: int) -> Iterator[list[Any]]:
        """What ``Source.rows`` tells, to its end. *Errors*: ConnectionError when that does not come."""
        response = self._ask("GET", "/rebuild", {"start": start})
        unpacker = msgpack.Unpacker(max_buffer_size=64 << 20)
        last: list[Any] = []
        while data := response.read1(_READ_BYTES):
            unpacker.feed(data)
            for last in unpacker:
                yield last
        if not last or last[0] != "all":
            raise ConnectionResetError("the list ended early")

    def pin(self, topic_id: int, number: int, start: int) -> Pinned:
        """A generation that stays as it is. *Errors*: UnknownTopic, Unavailable, Corrupt and those of all calls."""
        fields = {"topic_id": topic_id, "partition": number, "start": start}
        found = msgpack.unpackb(self._ask("POST", "/pins", fields).read())
        manifest = manifests.decode(found["manifest"], file="the manifest of the master")
        manifests.check_loaded(
            manifest, file="the manifest of the master", topic_id=topic_id, partition=number
        )
        return Pinned(str(found["id"]), manifest, int(found["position"]))

    def batches(self, pin: str, segment: int, position: int, size: int) -> BufferedIOBase:
        """Bytes of a segment, to be read to their end. *Errors*: SnapshotExpired and those of all calls."""
        return self._ask("GET", f"/pins/{pin}", {"segment": segment, "position": position, "size": size})

    def mask(self, pin: str, segment: int) -> bytes:
        return self._ask("GET", f"/pins/{pin}", {"segment": segment}).read()

    def release(self, pin: str) -> None:
        """The master forgets a pin by itself, later: what goes wrong here is no trouble."""
        with contextlib.suppress(FirnError, OSError, http.client.HTTPException):
            self._ask("DELETE", f"/pins/{pin}", {}).read()

    def close(self) -> None:
        """End what waits, from any thread; nothing is asked any more."""
        self._is_closed = True
        found = self._connection.sock
        if found is not None:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """The thread that uses it needs it no more."""
        self._connection.close()

    def _connect(self) -> None:
        self._connection.connect()
        self._connection.sock.settimeout(TIMEOUT_S)

    def _ask(self, method: str, path: str, query: Mapping[str, str | int]) -> http.client.HTTPResponse:
        if self._is_closed:
            raise Unavailable("this node is stopping")
        target = f"{PATH}{path}?{urlencode({**self._where.query, **query})}"
        if self._connection.sock is None:
            self._connect()
        self._connection.request(
            method, target, headers={**self._where.headers, "Accept": MSGPACK_TYPE, "Content-Length": "0"}
        )
        response = self._connection.getresponse()
        if response.status >= 300:
            raise _error_of(response.status, response.read())
        return response


def _error_of(status: int, body: bytes) -> FirnError:
    try:
        return from_document(msgpack.unpackb(body))
    except (ValueError, TypeError, AttributeError):
        return Unavailable(f"the master answered {status} {body[:200]!r}")
