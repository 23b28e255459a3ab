"""How a broker becomes a replica of its group: the driver with its doors, made from an opened folder, and what a
replica has beside it.
"""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from firn.batch import Batch
from firn.types import TOPICS_TOPIC_ID
from firn_node.coordinator import Coordinator
from firn_node.engine.api import FIRST_GROUP
from firn_node.engine.catalogue import topic_of
from firn_node.engine.core import Core
from firn_node.engine.groupcommits import GroupCommits
from firn_node.engine.parts import FIRST_POSITION, Parts
from firn_node.engine.replica import Replica
from firn_node.log import CommitLog
from firn_node.log.walk import headers
from firn_node.rebuild.source import Source
from firn_node.rebuild.standby import Host, Rebuilding
from firn_node.replication.doors.given import Doors
from firn_node.replication.doors.peers import Dialling
from firn_node.replication.doors.startup import machine_boot_id, open_folder
from firn_node.replication.driver import GroupDriver
from firn_node.replication.record import GroupId, Incarnation, LogId, Member
from firn_node.replication.state import Me, Timing
from firn_node.settings import GroupSettings

if TYPE_CHECKING:
    from firn_node.engine.following import Followers, Following


@dataclass(slots=True)
class Membership:
    """A broker's part in its group. ``followers``: of group 0 of several groups; ``following``: of the others."""

    group: GroupDriver
    replica: Replica
    source: Source
    rebuilding: Rebuilding
    followers: "Followers | None" = None
    following: "Following | None" = None


def become_replica(
    parts: Parts, host: Host, settings: GroupSettings, coordinator: Coordinator, dialling: Dialling | None,
    closing: contextlib.ExitStack,
) -> Membership:  # fmt: skip
    """The group says from here on what is committed, and so what is dispatched. *Errors*: as ``join_group``."""
    core, commits = parts.core, parts.commits
    assert isinstance(commits, GroupCommits), "parts of a broker with a group"
    replica = Replica(
        core, parts.partitions, parts.lookup, parts.dispatcher, parts.appender, commits,
        first_position=FIRST_POSITION,
    )  # fmt: skip
    closing.callback(replica.close)
    group = join_group(core, replica, settings, coordinator, dialling)
    commits.join(group)
    replica.join(group)
    source = Source(core, parts.partitions, parts.scheduler)
    rebuilding = Rebuilding(
        core, parts.partitions, parts.scheduler, group, host,
        dialling=dialling or Dialling(), first_position=FIRST_POSITION,
    )  # fmt: skip
    replica.holds = lambda: rebuilding.holds_dispatch
    member = Membership(group, replica, source, rebuilding)
    if settings.groups > 1:
        _join_cluster(parts, member, coordinator)
    group.start()
    parts.background.spawn(rebuilding.run())
    return member


def _join_cluster(parts: Parts, member: Membership, coordinator: Coordinator) -> None:
    """Know the other groups; tell them of topics, or take theirs over from group 0."""
    from firn_node.engine.following import Followers, Following
    from firn_node.engine.others import Others

    core, group = parts.core, member.group
    core.others = Others(coordinator, core.groups, core.group, lambda: group.state.record)
    parts.background.spawn(core.others.run())
    if core.group == FIRST_GROUP:
        member.followers = Followers(core, lambda: (group.epoch, group.forced_epoch))
        parts.topics.lead(member.followers)
        return
    member.following = Following(
        core, core.others, parts.topics.take_over,
        lambda: group.epoch if group.is_master and group.is_settled else None,
        core.settings.security.as_client(),
    )  # fmt: skip
    core.catalogue.whole_to = member.following.whole_to
    parts.background.spawn(member.following.run())


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
