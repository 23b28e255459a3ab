"""What reading a file gives: facts, and what is wrong with it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from firn.errors import FirnError


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong. ``position`` is a byte of the file, None where the whole file is meant."""

    file: str
    position: int | None
    message: str
    expected: str | None = None
    found: str | None = None

    def sentence(self) -> str:
        """File, place and fault in one line."""
        if self.message.startswith(self.file):
            return self.message
        place = "" if self.position is None else f" at byte {self.position}"
        return f"{self.file}{place}: {self.message}"

    def document(self) -> dict[str, Any]:
        return asdict(self)


def damage_of(error: FirnError, *, file: str, position: int | None = None) -> Damage:
    """The damage that an error of a decoder tells of; its own file and position count more than those given."""
    details = error.details
    expected, found = details.get("expected"), details.get("found")
    return Damage(
        str(details.get("file", file)),
        details.get("position", position),
        error.message,
        None if expected is None else str(expected),
        None if found is None else str(found),
    )


@dataclass(slots=True)
class FileReport:
    """One file as read. ``items``: its batches or rows, one document each, made when asked for."""

    path: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is no damage and yet worth knowing
    items: Iterator[dict[str, Any]] = field(default_factory=lambda: iter(()))

    def damaged(
        self, position: int | None, message: str, *, expected: object = None, found: object = None
    ) -> None:
        self.damages.append(
            Damage(
                self.path,
                position,
                message,
                None if expected is None else str(expected),
                None if found is None else str(found),
            )
        )

    def document(self) -> dict[str, Any]:
        return {
            "file": self.path,
            "kind": self.kind,
            **self.facts,
            "damages": [damage.document() for damage in self.damages],
            "notes": self.notes,
        }
