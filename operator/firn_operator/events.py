"""Events: what a person would want to know, each said once.

``REASONS`` has every reason there is, for documentation and tests.

An event's name is made of what it says, so that a second operator, or the same one started again, that says the same
within the hour that the API server keeps it for, is told that it is there.
"""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime

from firn.errors import Conflict, FirnError
from firn_operator.kube import EVENT, Kube, Obj, name_of, namespace_of
from firn_operator.names import MANAGER
from firn_operator.same import digest

_log = logging.getLogger(__name__)
MESSAGE_MAX = 1024
NORMAL, WARNING = "Normal", "Warning"


@dataclass(frozen=True, slots=True)
class Reason:
    about: str
    type: str
    when: str


REASONS = {
    "Ready": Reason("cluster", NORMAL, "it has become ready"),
    "NotReady": Reason("cluster, topic", WARNING, "it was ready, and is not any more"),
    "PodRestarted": Reason("cluster", NORMAL, "a pod was stopped because it was not as it is wished"),
    "SwitchedOver": Reason("cluster", NORMAL, "a master handed over because the operator asked it to"),
    "ScaledDown": Reason("cluster", NORMAL, "pods went because fewer replicas are wished"),
    "VolumeGivenUp": Reason("cluster", WARNING, "a lost volume was replaced by an empty one, to be rebuilt"),
    "CompactionScheduled": Reason("topic", NORMAL, "a run was asked for by the topic's schedule"),
    "ScheduleMissed": Reason("topic", WARNING, "a time of its schedule was passed over"),
    "CompactionStarted": Reason("run", NORMAL, "a forced compaction began"),
    "CompactionDone": Reason("run", NORMAL, "it ended well"),
    "CompactionFailed": Reason("run", WARNING, "it did not"),
    # Of Degraded, when it becomes true or for another reason.
    "RecordLost": Reason(
        "cluster", WARNING, "the record of a group is gone, damaged or older than one that counted"
    ),
    "PodStuck": Reason("cluster", WARNING, "a pod is not ready for five minutes"),
    "RebuildStuck": Reason("cluster", WARNING, "the rebuild of a replica gets no further"),
    "ScaleBelowMinInSync": Reason(
        "cluster", WARNING, "fewer replicas are wished than a topic asks for in sync"
    ),
    "StorageShrinks": Reason("cluster", WARNING, "volumes are wished smaller than they are"),
    "StorageCannotGrow": Reason("cluster", WARNING, "the StorageClass does not expand volumes"),
    "NoImage": Reason("cluster", WARNING, "no image of the broker is named"),
    "NameTaken": Reason("cluster, topic", WARNING, "an object of this name is somebody else's"),
    "Refused": Reason("cluster, topic", WARNING, "the API server or the brokers refuse what is wished"),
    "NoCluster": Reason("topic", WARNING, "the cluster that it names is not there"),
    "MinInSyncTooHigh": Reason("topic", WARNING, "it asks for more replicas in sync than there are"),
    "BadSchedule": Reason("topic", WARNING, "its schedule is none"),
    "CompactionFails": Reason(
        "topic", WARNING, "the newest compaction of a partition failed; what was compacted before is served"
    ),
}


class Events:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def post(self, about: Obj, reason: str, message: str, *, is_warning: bool = False) -> None:
        """Say it; that it could not be said is only logged."""
        meta, now = about["metadata"], datetime.now(UTC)
        said = digest([meta.get("uid"), reason, message, now.strftime("%Y-%m-%dT%H")])
        namespace, name = namespace_of(about), name_of(about)
        time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        body: Obj = {
            "apiVersion": EVENT.api_version, "kind": EVENT.kind,
            "metadata": {"name": f"{name[:200]}.{said}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"], "kind": about["kind"], "name": name, "namespace": namespace,
                "uid": meta.get("uid", ""),
            },
            "reason": reason, "message": message[:MESSAGE_MAX], "type": WARNING if is_warning else NORMAL,
            "source": {"component": MANAGER}, "firstTimestamp": time, "lastTimestamp": time, "count": 1,
        }  # fmt: skip
        try:
            await self._kube.create(EVENT, namespace, body)
        except Conflict:
            pass  # said already
        except FirnError as error:
            _log.warning("event %s of %s: %s", reason, name, error.message)
