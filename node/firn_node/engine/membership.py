"""How a broker becomes a replica of its group: the driver with its doors, made from an opened folder."""

import numpy as np

from firn.batch import Batch
from firn.types import TOPICS_TOPIC_ID
from firn_node.coordinator import Coordinator
from firn_node.engine.catalogue import topic_of
from firn_node.engine.core import Core
from firn_node.engine.replica import Replica
from firn_node.log import CommitLog
from firn_node.log.walk import headers
from firn_node.replication.doors.peers import Dialling
from firn_node.replication.doors.startup import machine_boot_id, open_folder
from firn_node.replication.driver import Doors, GroupDriver
from firn_node.replication.record import GroupId, Incarnation, LogId, Member
from firn_node.replication.state import Me, Timing
from firn_node.settings import GroupSettings


def join_group(
    core: Core, replica: Replica, settings: GroupSettings, coordinator: Coordinator, dialling: Dialling | None
) -> GroupDriver:
    """The driver, not yet started. *Errors*: Corrupt: rebuild under a new log_id; Invalid: another group's folder."""
    group_id = GroupId(str(settings.group))
    durability = core.catalogue.durability()
    folder = open_folder(
        core.disk,
        core.settings.data,
        group_id,
        core.log,
        boot_id=machine_boot_id(),
        committed=core.index.checkpoint,
        largest_min_in_sync=durability.min_in_sync,
        has_interval=durability.flush == "interval" or makes_interval(core.log, core.index.checkpoint),
    )
    me = Me(
        group_id,
        LogId(core.identity.log_id),
        Incarnation(core.randomness.bytes(8).hex()),
        Member(core.settings.node, core.settings.address, settings.ordinal),
    )
    lease_ttl = settings.lease_ttl_ms / 1000
    doors = Doors(
        log=core.log,
        folder=folder,
        coordinator=coordinator,
        engine=replica,
        clock=core.machine_clock,
        log_clock=core.clock,
        randomness=core.randomness,
        timing=Timing(lease_ttl, settings.replica_max_lag_ms / 1000 or lease_ttl),
        flush_interval_s=core.settings.flush_interval_ms / 1000,
        dialling=dialling or Dialling(),
    )
    return GroupDriver(me, doors)


def makes_interval(log: CommitLog, position: int) -> bool:
    """Whether a record from ``position`` on gives a topic ``flush: interval``.

    The catalogue of a start is that of the checkpoint. Records of a topic made after it may have been acknowledged
    before they were durable, and the record that made it is durable wherever they were: what tells this process that
    it may have lost some lies in its log.
    """
    for _, data in log.scan(max(position, log.start), log.written_end):
        found = headers(data)
        for i in np.flatnonzero(found.topic_ids == TOPICS_TOPIC_ID).tolist():
            start = int(found.starts[i])
            batch = Batch(memoryview(data)[start : start + int(found.sizes[i])])
            for key, value in zip(batch.key_list(), batch.value_list(), strict=True):
                if value is not None and topic_of(key.decode(), value).spec.durability.flush == "interval":
                    return True
    return False
