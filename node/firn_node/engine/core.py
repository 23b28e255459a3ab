"""What the engine's parts share: the doors, the logs, the tables, and the broker's own health."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from firn.errors import NotMaster, Unavailable
from firn_node.clock import Clock, LogClock, Randomness
from firn_node.disk import Disk
from firn_node.engine.catalogue import Catalogue
from firn_node.engine.identity import Identity
from firn_node.engine.reserve import Reserve
from firn_node.filecache import FileCache
from firn_node.index import PartitionIndex
from firn_node.log import CommitLog, KeyQueryIndex
from firn_node.settings import BrokerSettings

if TYPE_CHECKING:
    from firn_node.engine.others import Others

# Counters that alerts watch are there from the start: one that begins with its first failure has not risen since.
ALERTED = (
    "seal_failures",
    "checkpoint_failures",
    "partitions_parked",
    "compactions_done",
    "compactions_failed",
    "compactions_disagreement",
)


@dataclass(slots=True)
class Health:
    """Why the broker refuses writes, or must stop. All sentences are for people."""

    read_only: str | None = None  # the disk is full; goes away by itself once there is room
    failed: str | None = None  # an fsync or a bug: stop, restart from disk
    index_error: str | None = None  # dispatch stands still
    # Tasks in the background that failed and are tried again: what -> why. Each goes with its next success.
    troubles: dict[str, str] = field(default_factory=dict)
    stopped: "asyncio.Event" = field(default_factory=asyncio.Event)  # set with `failed`

    def fail(self, reason: str) -> None:
        if self.failed is None:
            self.failed = reason
            self.stopped.set()

    @property
    def reason(self) -> str | None:
        """The one sentence of ``firn status``: the worst first."""
        troubles = "; ".join(
            f"{what} failed, it is tried again: {why}" for what, why in self.troubles.items()
        )
        return self.failed or self.read_only or self.index_error or troubles or None

    def check_serving(self) -> None:
        if self.failed is not None:
            raise Unavailable(f"this broker stopped serving: {self.failed}")


@dataclass(slots=True)
class Core:
    settings: BrokerSettings
    disk: Disk
    machine_clock: Clock
    randomness: Randomness
    clock: LogClock
    cache: FileCache
    log: CommitLog
    index: PartitionIndex
    key_query: KeyQueryIndex
    identity: Identity
    secret: NDArray[np.uint64]
    catalogue: Catalogue
    health: Health
    reserve: Reserve
    others: "Others | None" = None  # the groups of the cluster, of a broker that is in one
    dispatched_position: int = 0
    metrics: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ALERTED, 0)))

    @property
    def group(self) -> int:
        """The number of this broker's group; 0 of a broker of its own."""
        return 0 if self.settings.group is None else self.settings.group.group

    @property
    def groups(self) -> tuple[int, ...]:
        """The numbers of all groups of the cluster."""
        return (0,) if self.settings.group is None else tuple(range(self.settings.group.groups))

    def elsewhere(self, what: str, group: int) -> NotMaster:
        """The answer to a request that is another group's; it names that group's master where that is known."""
        address = None if self.others is None else self.others.master_of(group)
        return NotMaster(f"{what} broker group {group}: ask its master", address=address, group=group)
