"""A bounded map with least-recently-written eviction: one writing thread, any number of readers.

Readers take no lock: a single ``get`` of a dict is atomic in CPython, and a miss only costs a look into the
database, which is written before the map is.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(Generic[K, V]):
    __slots__ = ("_limit", "_map", "get")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._map: OrderedDict[K, V] = OrderedDict()
        self.get = self._map.get

    def __len__(self) -> int:
        return len(self._map)

    def put(self, key: K, value: V) -> None:
        found = self._map
        found[key] = value
        found.move_to_end(key)
        if len(found) > self._limit:
            found.popitem(last=False)

    def clear(self) -> None:
        self._map.clear()
