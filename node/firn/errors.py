"""Errors, classed by what the caller should do about them.

::

    FirnError
    ├── Unavailable        retry later (same request, same producer sequence)
    │   ├── Timeout            outcome unknown; a retry with the same sequence is safe
    │   ├── ReadOnly           the disk is full or broken; reads go on
    │   ├── PartitionParked    this partition alone has trouble, named in the message
    │   └── NotEnoughInSync    too few replicas hold the log
    ├── NotMaster          ask the node named in ``address``
    │   └── Fenced             a newer epoch or producer exists: stop writing
    ├── Invalid            change the request
    │   ├── UnknownTopic
    │   ├── TopicExists
    │   ├── UnknownPartition
    │   ├── BadOffset
    │   ├── NotFound
    │   ├── UnknownPlan        of a forced compaction: plan again
    │   ├── AlreadyUploaded    another statement about this slice is here, and counts
    │   ├── MalformedBatch     structure, checksum or version of a batch
    │   ├── SequenceGap        a producer's batch is missing before this one
    │   ├── Unauthorized       who are you?
    │   └── Forbidden          not with these rights
    ├── Conflict           read again, decide anew
    ├── OffsetExpired      start anew from ``earliest``
    ├── SnapshotExpired    start anew: a removed tombstone may have been missed
    ├── LimitExceeded      less, or slower
    ├── Corrupt            repair from a peer; names file, position, expected and found
    └── InvariantBroken    a bug: stop this process

Every class has a wire ``code``, an HTTP ``status`` and says whether a ``retry`` of the same request may help.
"""

from typing import Any, ClassVar


class FirnError(Exception):
    """Base of all. ``details`` travel with the error: only JSON values."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retry: bool = False  # of the class; what a peer said of an instance counts over it

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def document(self) -> dict[str, Any]:
        """The error as it travels: ``{"error", "message", "retry", ...details}``."""
        return {"error": self.code, "message": self.message, "retry": self.retry, **self.details}


class Unavailable(FirnError):
    code, status, retry = "unavailable", 503, True


class Timeout(Unavailable):
    code, status = "timeout", 504


class ReadOnly(Unavailable):
    code = "read_only"


class PartitionParked(Unavailable):
    code = "partition_parked"


class NotEnoughInSync(Unavailable):
    code = "not_enough_in_sync"


class NotMaster(FirnError):
    code, status, retry = "not_master", 421, True


class Fenced(NotMaster):
    code, status, retry = "fenced", 409, False


class Invalid(FirnError):
    code, status = "invalid", 400


class UnknownTopic(Invalid):
    code, status = "unknown_topic", 404


class TopicExists(Invalid):
    code, status = "topic_exists", 409


class UnknownPartition(Invalid):
    code, status = "unknown_partition", 404


class BadOffset(Invalid):
    code = "bad_offset"


class NotFound(Invalid):
    code, status = "not_found", 404


class UnknownPlan(Invalid):
    """A plan that was dropped, or is of a master that is no more: ask for a new one."""

    code, status = "unknown_plan", 404


class AlreadyUploaded(Invalid):
    """A statement about this slice is here, and says something else; it counts, and is as true as this one."""

    code, status = "already_uploaded", 409


class MalformedBatch(Invalid):
    code = "malformed_batch"


class SequenceGap(Invalid):
    code = "sequence_gap"


class Unauthorized(Invalid):
    code, status = "unauthorized", 401


class Forbidden(Invalid):
    code, status = "forbidden", 403


class Conflict(FirnError):
    """A compare-and-set lost; ``newest_offset`` (-1: none) is the key's newest, committed one."""

    code, status = "conflict", 412


class OffsetExpired(FirnError):
    """A raw reader asked for what retention removed; ``earliest`` is the first offset that is left."""

    code, status = "offset_expired", 410


class SnapshotExpired(FirnError):
    code, status = "snapshot_expired", 410


class LimitExceeded(FirnError):
    code, status = "limit_exceeded", 413


class Corrupt(FirnError):
    code, status = "corrupt", 500


class InvariantBroken(FirnError):
    code, status = "invariant_broken", 500


def _classes(root: type[FirnError]) -> dict[str, type[FirnError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_classes(child))
    return found


BY_CODE: dict[str, type[FirnError]] = _classes(FirnError)


def from_document(document: dict[str, Any]) -> FirnError:
    """The error that a peer sent; an unknown code becomes a plain FirnError that keeps its text."""
    kind = BY_CODE.get(str(document.get("error")), FirnError)
    details = {k: v for k, v in document.items() if k not in ("error", "message", "retry")}
    error = kind(str(document.get("message", document)), **details)
    if isinstance(document.get("retry"), bool):
        error.retry = document["retry"]
    return error
