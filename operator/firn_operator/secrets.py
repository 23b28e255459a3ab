"""Secrets and ClusterRoleBindings, read by name: the operator may not list them, so no watch tells it of changes.

What was read counts for ``FRESH_S``, what the operator wrote itself too; so a change by somebody else is undone a few
minutes later, and a cluster at rest costs a handful of reads then.
"""

from collections.abc import Callable, Iterable

from firn_operator.kube import CLUSTER_ROLE_BINDING, SECRET, Kind, Kube, Obj, name_of, namespace_of

FRESH_S = 300.0


class Secrets:
    def __init__(self, kube: Kube, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[tuple[str, str, str], tuple[float, Obj | None]] = {}

    async def read(self, namespace: str, names: Iterable[str]) -> dict[str, Obj]:
        """Those of the Secrets that are there."""
        return await self._read(SECRET, namespace, names)

    async def bindings(self, names: Iterable[str]) -> dict[str, Obj]:
        """Those of the ClusterRoleBindings that are there."""
        return await self._read(CLUSTER_ROLE_BINDING, "", names)

    async def _read(self, kind: Kind, namespace: str, names: Iterable[str]) -> dict[str, Obj]:
        found = {}
        for name in names:
            key = (kind.kind, namespace, name)
            read_at, obj = self._known.get(key, (float("-inf"), None))
            if obj is None or self._clock() - read_at >= FRESH_S:
                obj = await self._kube.get(kind, namespace, name)
                self._known[key] = (self._clock(), obj)
            if obj is not None:
                found[name] = obj
        return found

    def note(self, secret: Obj) -> None:
        self._known[(SECRET.kind, namespace_of(secret), name_of(secret))] = (self._clock(), secret)

    def note_binding(self, binding: Obj) -> None:
        self._known[(CLUSTER_ROLE_BINDING.kind, "", name_of(binding))] = (self._clock(), binding)

    def forget(self, namespace: str, name: str) -> None:
        self._known.pop((SECRET.kind, namespace, name), None)

    def forget_binding(self, name: str) -> None:
        self._known.pop((CLUSTER_ROLE_BINDING.kind, "", name), None)

    def forget_all(self, namespace: str) -> None:
        """After a conflict: what is known of a namespace is old."""
        for key in [key for key in self._known if key[1] == namespace]:
            del self._known[key]
