"""Which brokers a client talks to: ``HOST:PORT[,HOST:PORT...]``, tried in turn.

Order: the argument, else ``$FIRN_BROKER``, else ``127.0.0.1:7700``. The address that worked last, or that a
``not_master`` answer named, comes first.
"""

import os
from collections.abc import Iterable
from random import Random

from firn.errors import Invalid

DEFAULT = "127.0.0.1:7700"
ENVIRONMENT = "FIRN_BROKER"
ASIDE_FAILURES = 8


def parse_addresses(text: str | None) -> list[str]:
    """The addresses of ``text``, in its order, without repeats.

    Errors: Invalid, naming the address that is not ``HOST:PORT``.
    """
    given = text or os.environ.get(ENVIRONMENT) or DEFAULT
    found = []
    for part in given.split(","):
        address = part.strip()
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise Invalid(f"broker address {address!r}: expected HOST:PORT, several parted by commas")
        found.append(address)
    return list(dict.fromkeys(found))


class Addresses:
    """The known addresses, the preferred one first."""

    def __init__(self, text: str | None) -> None:
        self._known = parse_addresses(text)
        self._aside: dict[str, int] = {}  # addresses, and after how many failures of others they count again

    def in_turn(self) -> list[str]:
        if not self._aside:
            return list(self._known)
        return sorted(self._known, key=lambda address: address in self._aside)

    @property
    def preferred(self) -> str:
        return self.in_turn()[0]

    def prefer(self, address: str) -> None:
        """``address`` comes first from now on; one that was not known is kept as well."""
        self._aside.pop(address, None)
        self._known = [address, *(a for a in self._known if a != address)]

    def shuffle(self, randomness: Random) -> None:
        """In any order: one broker is as good as another."""
        randomness.shuffle(self._known)

    def add(self, addresses: Iterable[str]) -> None:
        """Further ones, behind those that are known."""
        self._known += [address for address in addresses if address not in self._known]

    def put_last(self, address: str) -> None:
        """``address`` failed: the others come first."""
        if address in self._known:
            self._known = [*(a for a in self._known if a != address), address]
        self._aside = {a: left - 1 for a, left in self._aside.items() if left > 1}

    def set_aside(self, address: str) -> None:
        """Nobody answered at ``address``, perhaps only after seconds: others are tried for a while, unless one of them
        names it.
        """
        self.put_last(address)
        if address in self._known:
            self._aside[address] = ASIDE_FAILURES
