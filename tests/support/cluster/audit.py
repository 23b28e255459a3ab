"""What the API server was asked, by whom, and by which rule it was allowed: its audit log, read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True, slots=True)
class Request:
    user: str
    agent: str
    verb: str
    group: str  # the API group; "" for the core one
    resource: str  # with its subresource: ``pods/exec``
    namespace: str
    name: str
    code: int
    allowed_by: str  # the RBAC sentence that names binding and role; "" when RBAC did not decide
    body: Any  # what was sent, for a write; without it None

    @property
    def is_write(self) -> bool:
        return self.verb in WRITES


class AuditLog:
    """The requests that have been answered, from a mark on."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def mark(self) -> int:
        """The end as it is now, for `since`."""
        return self._file.stat().st_size

    def since(self, mark: int = 0) -> Iterator[Request]:
        """Each request once, in the order of the answers; a watch when it has begun and again when it has ended."""
        with self._file.open("rb") as file:
            file.seek(mark)
            for line in file:
                if line.endswith(b"\n"):  # the last line may be on its way
                    yield _request(json.loads(line))


def _request(event: dict[str, Any]) -> Request:
    asked = event.get("objectRef", {})
    resource = asked.get("resource", event["requestURI"].split("?")[0])
    notes = event.get("annotations", {})
    return Request(
        user=event["user"].get("username", ""),
        agent=event.get("userAgent", ""),
        verb=event["verb"],
        group=asked.get("apiGroup", ""),
        resource=f"{resource}/{asked['subresource']}" if "subresource" in asked else resource,
        namespace=asked.get("namespace", ""),
        name=asked.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        allowed_by=notes.get("authorization.k8s.io/reason", ""),
        body=event.get("requestObject"),
    )
