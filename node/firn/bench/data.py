"""The records that every measurement writes: deterministic, so that two brokers get the same bytes.

Keys are 16 digits. Record ``i`` has key number ``i * STRIDE % keys``: a prime stride walks through all keys before
one comes again, in no order that sorting or compression could use. Values come from a small pool of random letters.
"""

import random
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

STRIDE = 2_654_435_761  # prime, so that it visits every key when the count of keys is not a multiple of it
POOL = 1024
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Data:
    """``records`` records over ``keys`` keys with values of ``value_bytes``, numbered from ``first`` on."""

    records: int
    keys: int
    value_bytes: int
    first: int = 0  # the keys of the numbers below are others, as long as there are others

    @cached_property
    def pool(self) -> list[bytes]:
        """The values; record ``i`` has the one at ``i % POOL``."""
        chosen = random.Random(self.value_bytes)
        return [bytes(chosen.choices(_LETTERS, k=self.value_bytes)) for _ in range(POOL)]

    def key_list(self, start: int, end: int) -> list[bytes]:
        """The keys of records ``[start, end)``."""
        digits = _four_digits()
        numbers = np.arange(self.first + start, self.first + end, dtype=np.uint64)
        left = numbers * np.uint64(STRIDE) % np.uint64(self.keys)
        quarters = np.empty((len(left), 4), np.uint32)
        for place in (3, 2, 1, 0):
            rest = left // np.uint64(10_000)
            quarters[:, place] = digits[left - rest * np.uint64(10_000)]
            left = rest
        found: list[bytes] = quarters.view("S16").ravel().tolist()
        return found

    def value_list(self, start: int, end: int) -> list[bytes]:
        """The values of records ``[start, end)``."""
        first = start % POOL
        pool = self.pool[first:] + self.pool[:first]
        times, rest = divmod(end - start, POOL)
        return pool * times + pool[:rest]

    @property
    def live(self) -> int:
        """Keys that have a record."""
        return min(self.records, self.keys)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return self.records * (16 + self.value_bytes)


@cache
def _four_digits() -> NDArray[np.uint32]:
    """The four digits of each number below 10,000, as one word."""
    return np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), np.uint32)
