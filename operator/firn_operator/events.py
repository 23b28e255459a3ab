"""Events: what a person would want to know, each said once.

=================== ======= ====================================================================
reason              type    when
=================== ======= ====================================================================
Ready               Normal  a cluster or topic has become ready
NotReady            Warning it has been ready, and is not any more
PodRestarted        Normal  a pod was stopped because it was not as it is wished
SwitchedOver        Normal  a master handed over because the operator asked it to
ScaledDown          Normal  pods went because fewer replicas are wished
VolumeGivenUp       Warning a lost volume was replaced by an empty one, to be rebuilt
a Degraded reason   Warning something needs a person: the reason and sentence of the condition
CompactionStarted   Normal  a forced compaction began
CompactionDone      Normal  it ended well
CompactionFailed    Warning it did not
=================== ======= ====================================================================

An event's name is made of what it says, so that a second operator, or the same one started again, that says the same
within the hour that the API server keeps it for, is told that it is there.
"""

import logging
from datetime import UTC, datetime

from firn.errors import Conflict, FirnError
from firn_operator.kube import EVENT, Kube, Obj, name_of, namespace_of
from firn_operator.names import MANAGER
from firn_operator.same import digest

_log = logging.getLogger(__name__)
MESSAGE_MAX = 1024


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
            "reason": reason, "message": message[:MESSAGE_MAX], "type": "Warning" if is_warning else "Normal",
            "source": {"component": MANAGER}, "firstTimestamp": time, "lastTimestamp": time, "count": 1,
        }  # fmt: skip
        try:
            await self._kube.create(EVENT, namespace, body)
        except Conflict:
            pass  # said already
        except FirnError as error:
            _log.warning("event %s of %s: %s", reason, name, error.message)
