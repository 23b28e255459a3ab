"""A Kubernetes in memory for the operator's tests: a store with server-side apply, and what would react to it.

``World.turn()`` lets the others act once, always in the same order: the StatefulSets' controller, kubelets, the
brokers, who elect, catch up, leave, take topics over and copy their record, and the garbage collector. Nothing happens
between turns, so every run is the same. ``World.check()`` holds every turn to what must be true at all times.

Faults: ``on_request(verb, kind, name)`` is asked before each request of the operator and may raise; ``bad_images``
never become ready; a node in ``gone_nodes`` has taken its volumes along.
"""

import copy
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

import firn_operator
from firn.errors import Conflict, Forbidden, NotFound, Unavailable
from firn_operator.brokers import Way
from firn_operator.events import REASONS
from firn_operator.kube import (
    CLAIM,
    CLUSTER,
    COMPACTION,
    EVENT,
    GROUP,
    JOB,
    KINDS,
    LEASE,
    NODE,
    POD,
    STATEFUL_SET,
    TOPIC,
    Kind,
    Obj,
    name_of,
    namespace_of,
)  # fmt: skip
from firn_operator.names import RECORD, is_cluster_name
from firn_operator.observe import cluster_of
from firn_operator.reconcile import Key
from firn_operator.running import Operator
from firn_operator.same import digest

NAMESPACE = "shop"
IMAGE, SPARK_IMAGE = "firn:1", "firn-spark:1"
QUIET_ROUNDS = 8
START = datetime(2026, 1, 1, tzinfo=UTC)
MANAGER = "firn-operator"
TIME = "%Y-%m-%dT%H:%M:%SZ"
RULES = yaml.safe_load((Path(firn_operator.__file__).parent / "rights.yaml").read_text())["rules"]
MAY_BE_DELETED = {kind for rule in RULES if "delete" in rule["verbs"] for kind in rule["resources"]}


class Killed(BaseException):
    """The operator's process ends here."""


@dataclass
class Request:
    verb: str
    kind: str
    name: str

    @property
    def is_write(self) -> bool:
        return self.verb not in ("get", "list")


def _allow(request: Request) -> None:
    """No fault."""


class Store:
    """Objects, versions, and server-side apply as one manager does it. What is stored is never changed in place."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Obj] = {}
        self.version = 0
        self.now = START
        self.requests: list[Request] = []
        self.on_request: Callable[[Request], None] = _allow
        self._applied: dict[tuple[str, str, str, str], Obj] = {}

    def time(self) -> datetime:
        return self.now

    def seconds(self) -> float:
        return (self.now - START).total_seconds()

    # As the others see it.

    def all(self, kind: Kind) -> list[Obj]:
        return [obj for key, obj in sorted(self.objects.items()) if key[0] == kind.kind]

    def find(self, kind: Kind, name: str, namespace: str = NAMESPACE) -> Obj | None:
        return self.objects.get((kind.kind, namespace if kind.is_namespaced else "", name))

    def put(self, obj: Obj) -> Obj:
        """Store an object; its version moves when it says something new."""
        key = (obj["kind"], namespace_of(obj), name_of(obj))
        old = self.objects.get(key)
        meta = obj["metadata"]
        if old is None:
            meta.setdefault("uid", f"uid-{self.version + 1}")
            meta.setdefault("generation", 1)
            meta.setdefault("creationTimestamp", self.now.strftime(TIME))
        else:
            for name in ("uid", "generation", "creationTimestamp"):
                meta.setdefault(name, old["metadata"][name])
        if old is None:
            pass
        elif {**obj, "metadata": {**meta, "resourceVersion": None}} == {
            **old, "metadata": {**old["metadata"], "resourceVersion": None}
        }:  # fmt: skip
            return old
        elif obj.get("spec") != old.get("spec"):
            meta["generation"] = int(old["metadata"].get("generation", 1)) + 1
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        if (
            "deletionTimestamp" in meta
            and not meta.get("finalizers")
            and obj["kind"] not in ("Pod", "PersistentVolumeClaim")
        ):
            self.objects.pop(key, None)
            return obj
        self.objects[key] = obj
        return obj

    def change(self, kind: Kind, name: str, change: Callable[[Obj], None]) -> None:
        obj = copy.deepcopy(self.find(kind, name))
        assert obj is not None, f"{kind.kind} {name}"
        change(obj)
        self.put(obj)

    def remove(self, kind: Kind, name: str, namespace: str = NAMESPACE) -> None:
        self.objects.pop((kind.kind, namespace if kind.is_namespaced else "", name), None)

    # As the operator sees it: ``Kube``.

    def _ask(self, verb: str, kind: Kind, name: str) -> None:
        request = Request(verb, kind.kind, name)
        self.requests.append(request)
        self.on_request(request)

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        self._ask("get", kind, name)
        return self.find(kind, name, namespace)

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> list[Obj]:
        self._ask("list", kind, "")
        labels = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
        return [
            obj for obj in self.all(kind)
            if (namespace is None or namespace_of(obj) == namespace)
            and labels.items() <= (obj["metadata"].get("labels") or {}).items()
        ]  # fmt: skip

    async def create(self, kind: Kind, namespace: str, body: Obj) -> Obj:
        self._ask("create", kind, name_of(body))
        if kind is EVENT:
            known = REASONS[body["reason"]]  # every reason there is is documented
            assert known.type == body["type"], body
        if self.find(kind, name_of(body), namespace) is not None:
            raise Conflict(f"{kind.kind} {name_of(body)} is there already")
        return copy.deepcopy(self.put(copy.deepcopy(body)))

    async def apply(self, kind: Kind, namespace: str, body: Obj, *, sub: str = "") -> Obj | None:
        self._ask("apply-status" if sub else "apply", kind, name_of(body))
        key = (kind.kind, namespace if kind.is_namespaced else "", name_of(body))
        old = self.objects.get(key)
        if old is None and sub:
            return None
        before = self._applied.get((*key, sub), {})
        new = (
            copy.deepcopy(old)
            if old is not None
            else {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": {}}
        )
        wanted = {"status": body["status"]} if sub else copy.deepcopy(body)
        merged = _merge(_without(new, before, wanted), wanted)
        merged["metadata"]["name"] = name_of(body)
        self._check_owners(kind, old, merged)
        self._applied[(*key, sub)] = copy.deepcopy(wanted)
        return copy.deepcopy(self.put(merged))

    def _check_owners(self, kind: Kind, old: Obj | None, new: Obj) -> None:
        """As OpenShift does (OwnerReferencesPermissionEnforcement): who changes an object's owner may delete the object."""
        owners = [each["metadata"].get("ownerReferences") or [] for each in (old or new, new)]
        if owners[0] != owners[1] and kind.plural not in MAY_BE_DELETED:
            raise Forbidden(f"{kind.plural}: cannot set an ownerRef on a resource you can't delete")

    async def patch(self, kind: Kind, namespace: str, name: str, body: Obj) -> Obj | None:
        self._ask("patch", kind, name)
        old = self.find(kind, name, namespace)
        if old is None:
            return None
        version = body.get("metadata", {}).get("resourceVersion")
        if version is not None and version != old["metadata"]["resourceVersion"]:
            raise Conflict(f"{kind.kind} {name} has changed")
        return copy.deepcopy(self.put(_merge(copy.deepcopy(old), copy.deepcopy(body))))

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, orphan: bool = False
    ) -> None:
        self._ask("delete", kind, name)
        old = self.find(kind, name, namespace)
        if old is None:
            return
        if uid is not None and old["metadata"]["uid"] != uid:
            raise Conflict(f"{kind.kind} {name} is another one now")
        self.end(kind, name, namespace, orphan=orphan)

    async def evict(self, namespace: str, pod: str, uid: str) -> bool:
        """Within the budget: one of a group may be away."""
        group = pod.rpartition("-")[0]
        away = [
            name_of(each) for each in self.all(POD)
            if name_of(each).rpartition("-")[0] == group and name_of(each) != pod and not is_ready(each)
        ]  # fmt: skip
        if away:
            self._ask("get", POD, pod)
            return False
        await self.delete(POD, namespace, pod, uid=uid)
        return True

    def end(self, kind: Kind, name: str, namespace: str = NAMESPACE, *, orphan: bool = False) -> None:
        """Begin the end of an object, as DELETE does."""
        old = copy.deepcopy(self.find(kind, name, namespace))
        if old is None:
            return
        old["metadata"].setdefault("deletionTimestamp", START.strftime(TIME))
        self.put(old)
        if orphan:
            for pod in self.all(POD):
                pod["metadata"].pop("ownerReferences", None)


def is_ready(pod: Obj) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _merge(old: Any, new: Any) -> Any:
    """The fields of ``new`` over those of ``old``; conditions and named rows by their key."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    for name, value in new.items():
        if name == "conditions":
            mine = {each["type"] for each in value}
            old[name] = [each for each in old.get(name, []) if each["type"] not in mine] + value
        elif value is None:
            old.pop(name, None)
        else:
            old[name] = _merge(old.get(name), value)
    return old


def _without(obj: Obj, before: Any, wanted: Any) -> Obj:
    """The object without the fields that were applied before and are not wanted any more."""
    for name, value in before.items():
        if not isinstance(wanted, dict) or name not in wanted:
            obj.pop(name, None)
        elif isinstance(value, dict) and isinstance(obj.get(name), dict):
            _without(obj[name], value, wanted[name])
    return obj


@dataclass
class Record:
    """A group's record, as the brokers of the group keep it."""

    epoch: int = 0
    version: int = 0
    master: str | None = None
    in_sync: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)

    def text(self) -> str:
        return json.dumps({
            "format": 1, "group_id": "0", "version": self.version, "epoch": self.epoch, "renewals": 0,
            "master": {"log_id": f"log-{self.master}", "incarnation": "x"} if self.master else None,
            "successor": None, "in_sync": sorted(f"log-{node}" for node in self.in_sync),
            "members": {f"log-{node}": {"node": node, "address": "", "ordinal": 0} for node in sorted(self.members)},
            "forced_epoch": 0,
        })  # fmt: skip


class World(Store):
    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, Record] = {}
        self.volumes: dict[str, str] = {}  # claims and the log that each holds
        self.bad_images: set[str] = set()
        self.lost_writes: list[str] = []
        self.most_down = 0
        self.switchovers: list[tuple[int, str]] = []
        self.refuse_switchovers = False
        self.compactions: dict[str, int] = {}
        self.plans: dict[str, Obj] = {}  # by topic
        self.topic_bytes = 1 << 20
        self.driver_says = ""  # the last words of drivers that fail
        self.bad_partition = ""  # the state that Spark's comparison ends in, in place of done
        self.drivers_at_work = True
        self.cancelled: list[str] = []
        self.stuck: set[str] = set()  # pods that find no node
        self.never_in_sync: set[tuple[str, str]] = set()  # images and pods
        self.rebuilds: dict[str, Obj] = {}  # pods that are being rebuilt, and what they say of it
        self.brokers_report = True
        self.elects = True  # False: the brokers wait for a person, and nobody is ready
        self._running: dict[str, int] = {}  # pods and since how many turns
        self._was_whole: set[str] = set()
        self._logs: dict[str, str] = {}  # of nodes, as their group knows them

    def turn(self) -> None:
        self.now += timedelta(seconds=1)
        for stateful_set in self.all(STATEFUL_SET):
            self._keep(stateful_set)
        self._end_pods()
        for pod in self.all(POD):
            if cluster_of(pod) is not None:
                self._run(pod)
        for lease in [obj for obj in self.all(LEASE) if self.elects and cluster_of(obj) is not None]:
            self._elect(lease)
        for pod in self.all(POD):
            self._ready(pod)
        for topic in self.all(TOPIC):
            self._take_over(topic)
        for job in self.all(JOB):
            self._drive(job)
        self._collect()
        self.check()

    # The StatefulSets' controller.

    def _keep(self, stateful_set: Obj) -> None:
        name, spec = name_of(stateful_set), stateful_set["spec"]
        revision = f"{name}-{digest(spec['template'])}"
        changed = copy.deepcopy(stateful_set)
        changed["status"] = {
            "observedGeneration": stateful_set["metadata"]["generation"],
            "updateRevision": revision,
        }
        self.put(changed)
        for ordinal in range(spec["replicas"]):
            pod = f"{name}-{ordinal}"
            if self.find(POD, pod) is None:
                self._make_pod(pod, revision, stateful_set)
        for pod_obj in self.all(POD):
            base, _, number = name_of(pod_obj).rpartition("-")
            if base == name and int(number) >= spec["replicas"]:
                self.end(POD, name_of(pod_obj))

    def _make_pod(self, pod: str, revision: str, stateful_set: Obj) -> None:
        template, claim = stateful_set["spec"]["template"], f"data-{pod}"
        wanted = stateful_set["spec"]["volumeClaimTemplates"][0]
        if self.find(CLAIM, claim) is None:
            meta = {"name": claim, "namespace": NAMESPACE, "labels": {
                **stateful_set["metadata"]["labels"], "app.kubernetes.io/managed-by": MANAGER,
            }}  # fmt: skip
            self.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta,
                      "spec": copy.deepcopy(wanted["spec"]), "status": {"phase": "Bound"}})  # fmt: skip
            self.volumes[claim] = f"log-{self.version}"
        self.put({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": pod, "namespace": NAMESPACE, "creationTimestamp": self.now.strftime(TIME),
                "labels": {**template["metadata"]["labels"], "controller-revision-hash": revision},
            },
            "spec": {"nodeName": f"node-{pod.rpartition('-')[2]}", "image": template["spec"]["containers"][0]["image"]},
            "status": {},
        })  # fmt: skip

    def _end_pods(self) -> None:
        for pod in self.all(POD):
            if "deletionTimestamp" in pod["metadata"]:
                self._running.pop(name_of(pod), None)
                self.stuck.discard(name_of(pod))
                self.remove(POD, name_of(pod))
                record = self.records.get(name_of(pod).rpartition("-")[0])
                if record is not None:
                    self._step_aside(record, name_of(pod))
        for claim in self.all(CLAIM):
            pod = name_of(claim).removeprefix("data-")
            if "deletionTimestamp" in claim["metadata"] and self.find(POD, pod) is None:
                self.remove(CLAIM, name_of(claim))
                self.volumes.pop(name_of(claim), None)

    def _step_aside(self, record: Record, node: str) -> None:
        others = record.in_sync - {node}
        if record.master == node:
            record.master = min(others, default=None)
            record.epoch += record.master is not None
        if others:
            record.in_sync.discard(node)
        record.version += 1

    def _run(self, pod: Obj) -> None:
        if name_of(pod) in self.stuck:
            return
        if pod["spec"]["image"] in self.bad_images:
            waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
            self._set_status(pod, ready=False, state=waiting)
            return
        self._running[name_of(pod)] = self._running.get(name_of(pod), 0) + 1

    def _set_status(self, pod: Obj, *, ready: bool, state: Obj) -> None:
        changed = copy.deepcopy(pod)
        conditions = (pod.get("status") or {}).get("conditions") or ()
        [old] = [each for each in conditions if each["type"] == "Ready"] or [{}]
        since = old["lastTransitionTime"] if old.get("status") == str(ready) else self.now.strftime(TIME)
        changed["status"] = {
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": since}],
            "containerStatuses": [{"name": "broker", "state": state}],
        }
        self.put(changed)

    # The brokers.

    def _elect(self, lease: Obj) -> None:
        name = name_of(lease)
        group = self.find(GROUP, name)
        if group is None:
            return
        record = self.records.setdefault(name, Record())
        running = {pod for pod in self._running if pod.rpartition("-")[0] == name}
        wished = {f"{name}-{number}" for number in range(group["spec"]["replicas"])}
        before = copy.deepcopy(record)
        for node in sorted(running):  # a volume that is new is a member that is new
            log = self.volumes.get(f"data-{node}", "")
            if self._logs.get(node) not in (None, log) and len(record.in_sync - {node}):
                record.in_sync.discard(node)
                record.members.discard(node)
                self._running[node] = 1
            self._logs[node] = log
        if record.master is not None and record.master not in running:
            record.master = None
        able = (record.in_sync or wished) & running
        if record.master is None and able:
            record.master, record.epoch = min(able), record.epoch + 1
            record.in_sync |= {record.master}
            record.members |= {record.master}
        if record.master is not None:
            record.members |= running & wished
            record.in_sync |= {
                node for node in running & wished if self._running[node] >= 3 and not self._is_held(node)
            }
            record.in_sync -= {node for node in record.in_sync if node not in running}
            leaving = {node for node in record.members if node not in wished and node != record.master}
            record.in_sync -= leaving
            record.members -= leaving
        if record != before:
            record.version = before.version + 1
        if record.version:
            changed = copy.deepcopy(lease)
            changed["metadata"].setdefault("annotations", {})[RECORD] = record.text()
            changed["spec"] = {"holderIdentity": record.master or ""}
            self.put(changed)
        if self.brokers_report and record.version:
            self._report(group, record)

    def _is_held(self, node: str) -> bool:
        pod = self.find(POD, node)
        return node in self.rebuilds or (
            pod is not None and (pod["spec"]["image"], node) in self.never_in_sync
        )

    def _report(self, group: Obj, record: Record) -> None:
        changed = copy.deepcopy(group)
        status = changed.setdefault("status", {})
        status |= {
            "epoch": record.epoch, "version": record.version, "inSync": sorted(record.in_sync),
            "members": [self._member(node) for node in sorted(record.members)],
        }  # fmt: skip
        status.pop("currentMaster", None)
        if record.master:
            status["currentMaster"] = record.master
        self.put(changed)

    def _member(self, node: str) -> Obj:
        member = {"node": node, "logId": f"log-{node}"}
        if node not in self.rebuilds:
            return member
        return {**member, "state": "rebuilding", "rebuild": copy.deepcopy(self.rebuilds[node])}

    def _ready(self, pod: Obj) -> None:
        record = self.records.get(name_of(pod).rpartition("-")[0], Record())
        if name_of(pod) in self._running:
            self._set_status(pod, ready=self.elects and name_of(pod) in record.in_sync, state={"running": {}})

    def _take_over(self, topic: Obj) -> None:
        cluster = (topic["spec"].get("clusterRef") or {}).get("name", name_of(topic))
        record = self.records.get(f"{cluster}-0")
        if record is None or record.master is None:
            return
        reason = "Created"
        if "deletionTimestamp" in topic["metadata"]:
            if topic["spec"].get("deletionPolicy", "Delete") == "Retain":
                return
            reason = "Deleted"
        condition = {
            "type": "Applied", "status": str(reason == "Created"), "reason": reason, "message": "", "lastTransitionTime": "",
            "observedGeneration": topic["metadata"]["generation"],
        }  # fmt: skip
        changed = copy.deepcopy(topic)
        self.put(_merge(changed, {"status": {"conditions": [condition]}}))

    async def switch_over(self, way: Way, group: int, to: str) -> None:
        """The brokers' door."""
        record = self.records[to.rpartition("-")[0]]
        if self.refuse_switchovers or to not in record.in_sync:
            raise Unavailable(f"{to} cannot take over")
        assert way.addresses, "nobody to ask"
        record.master, record.epoch, record.version = to, record.epoch + 1, record.version + 1
        self.switchovers.append((group, to))
        self._write_record(to.rpartition("-")[0])

    async def compact(self, way: Way, topic: str) -> Mapping[str, Any]:
        assert way.addresses, "nobody to ask"
        self.compactions[topic] = 0
        return self._compaction(topic)

    async def compaction(self, way: Way, topic: str) -> Mapping[str, Any] | None:
        if topic not in self.compactions:
            return None
        self.compactions[topic] += 1
        return self._compaction(topic)

    def _compaction(self, topic: str) -> Mapping[str, Any]:
        """Done when it was asked about three times."""
        state = "done" if self.compactions[topic] >= 3 else "running"
        row = {"partition": 0, "state": state, "records_before": 10, "records_after": 4, "seconds": 0.5}
        return {"topic": topic, "state": state, "partitions": [row]}

    async def cancel(self, way: Way, topic: str) -> None:
        self.cancelled.append(topic)
        if self.compactions.pop(topic, None) is None:
            raise NotFound(f"no compaction of {topic}")

    async def describe(self, way: Way, topic: str) -> Mapping[str, Any]:
        assert way.addresses, "nobody to ask"
        row = {"partition": 0, "compacted_bytes": self.topic_bytes, "raw_bytes": 0, "dirty_ratio": 0.0}
        return {"name": topic, "partitions": [row]}

    async def plan(self, way: Way, topic: str) -> Mapping[str, Any] | None:
        assert way.addresses, "nobody to ask"
        return copy.deepcopy(self.plans.get(topic))

    async def cancel_plan(self, way: Way, topic: str) -> None:
        self.cancelled.append(topic)
        if topic in self.plans:
            self.plans[topic]["state"] = "cancelled"

    # Spark's drivers: one slice a turn.

    def _drive(self, job: Obj) -> None:
        conditions = (job.get("status") or {}).get("conditions") or ()
        if conditions or not self.drivers_at_work:
            return
        words = job["spec"]["template"]["spec"]["containers"][0]["args"]
        topic, run = words[3], words[words.index("--run") + 1]
        pod = f"{name_of(job)}-x"
        if self.find(POD, pod) is None:
            self._make_driver(job, pod)
        if self.driver_says:
            ended = {"terminated": {"exitCode": 1, "message": f"some lines\n{self.driver_says}"}}
            self._set_status(self.find(POD, pod) or {}, ready=False, state=ended)
            said = {
                "reason": "BackoffLimitExceeded",
                "message": "Job has reached the specified backoff limit",
            }
            self._end_job(job, {"type": "Failed", "status": "True", **said})
            return
        plan = self.plans.get(topic)
        if plan is None or plan["run"] != run:
            row = {"partition": 0, "state": "waiting", "slices": 2, "uploaded": []}
            self.plans[topic] = {"id": f"plan-{run}", "run": run, "state": "open", "partitions": [row]}
        elif plan["state"] == "open" and len(plan["partitions"][0]["uploaded"]) < 2:
            uploaded = plan["partitions"][0]["uploaded"]
            uploaded.append(len(uploaded))
        elif plan["state"] == "open":
            numbers = {"records_before": 10, "records_after": 4, "seconds": 0.5, "tombstones_dropped": 1}
            plan["partitions"][0] |= {"state": self.bad_partition or "done", **numbers}
            if self.bad_partition:
                plan["partitions"][0]["disagreements"] = [17, 23]
            plan["state"] = "done"
        else:
            self._end_job(job, {"type": "Complete", "status": "True"})

    def _make_driver(self, job: Obj, pod: str) -> None:
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name_of(job), "uid": job["metadata"]["uid"]}
        meta = {
            "name": pod,
            "namespace": NAMESPACE,
            "labels": {"job-name": name_of(job)},
            "ownerReferences": [owner],
        }
        self.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {}})

    def _end_job(self, job: Obj, condition: Obj) -> None:
        changed = copy.deepcopy(job)
        changed["status"] = {"conditions": [condition]}
        self.put(changed)

    def _write_record(self, name: str) -> None:
        record = self.records[name]

        def write(lease: Obj) -> None:
            lease["metadata"].setdefault("annotations", {})[RECORD] = record.text()

        self.change(LEASE, name, write)
        group = self.find(GROUP, name)
        if group is not None and self.brokers_report:
            self._report(group, record)

    # Garbage collection.

    def _collect(self) -> None:
        uids = {obj["metadata"]["uid"] for obj in self.objects.values()}
        for obj in list(self.objects.values()):
            owners = obj["metadata"].get("ownerReferences") or ()
            if owners and not any(owner["uid"] in uids for owner in owners):
                self.end(KINDS[obj["kind"]], name_of(obj), namespace_of(obj))
        sets = {name_of(each) for each in self.all(STATEFUL_SET)}
        for pod in self.all(POD):
            is_brokers = cluster_of(pod) is not None
            if is_brokers and name_of(pod).rpartition("-")[0] not in sets and not self._is_orphan(pod):
                self.end(POD, name_of(pod))

    def _is_orphan(self, pod: Obj) -> bool:
        cluster = self.find(CLUSTER, cluster_of(pod) or "")
        return cluster is not None and "deletionTimestamp" not in cluster["metadata"]

    # What must be true at all times.

    def check(self) -> None:
        """Of every group that has once been whole at most one replica is down by the operator's doing."""
        for name, record in self.records.items():
            group = self.find(GROUP, name)
            cluster = self.find(CLUSTER, cluster_of(group) or "") if group is not None else None
            if group is None or cluster is None or "deletionTimestamp" in cluster["metadata"]:
                self._was_whole.discard(name)
                continue
            replicas = group["spec"]["replicas"]
            if len(record.in_sync) >= replicas:
                self._was_whole.add(name)
            elif name in self._was_whole:
                down = replicas - len(record.in_sync)
                self.most_down = max(self.most_down, down)
            if name in self._was_whole and record.master is None:
                self.lost_writes.append(f"{self.now}: {name} has no master")

    # Short cuts for tests.

    def cluster(self, name: str = "main", **spec: Any) -> Obj:
        assert is_cluster_name(name)
        body = {
            "apiVersion": CLUSTER.api_version, "kind": CLUSTER.kind, "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"groups": 1, "replicas": 3, "image": IMAGE, **spec},
        }  # fmt: skip
        return self.put(body)

    def topic(self, name: str, cluster: str | None = "main", **spec: Any) -> Obj:
        where = {"clusterRef": {"name": cluster}} if cluster else {}
        body = {
            "apiVersion": TOPIC.api_version, "kind": TOPIC.kind, "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"partitions": 1, **where, **spec},
        }  # fmt: skip
        return self.put(body)

    def force(self, name: str, topic: str, **spec: Any) -> Obj:
        meta = {"name": name, "namespace": NAMESPACE}
        wanted = {"topicRef": {"name": topic}, "engine": "auto", **spec}
        return self.put(
            {"apiVersion": COMPACTION.api_version, "kind": COMPACTION.kind, "metadata": meta, "spec": wanted}
        )

    def node(self, name: str, *, unschedulable: bool = False) -> None:
        meta = {"name": name, "labels": {"kubernetes.io/hostname": name}}
        self.put(
            {
                "apiVersion": "v1",
                "kind": NODE.kind,
                "metadata": meta,
                "spec": {"unschedulable": unschedulable},
            }
        )

    def pods(self, group: str = "main-0") -> list[Obj]:
        return [pod for pod in self.all(POD) if name_of(pod).rpartition("-")[0] == group]

    def images(self, group: str = "main-0") -> list[str]:
        return [pod["spec"]["image"] for pod in self.pods(group)]

    def writes(self, since: int = 0) -> list[Request]:
        return [request for request in self.requests[since:] if request.is_write]

    def condition(self, kind: Kind, name: str, type_: str) -> Obj:
        obj = self.find(kind, name) or {}
        found = [each for each in obj.get("status", {}).get("conditions", []) if each["type"] == type_]
        return found[0] if found else {}

    def events(self) -> list[str]:
        return [event["reason"] for event in self.all(EVENT)]


def new_operator(world: World, *, spark_image: str = SPARK_IMAGE) -> Operator:
    """An operator as a process begins: it knows nothing."""
    return Operator(
        world, world, image="", spark_image=spark_image, sees_nodes=True, randomness=random.Random(0), now=world.time,
        clock=world.seconds,
    )  # fmt: skip


async def one_round(operator: Operator) -> None:
    """Read everything anew, and one pass for each resource."""
    await operator.sweep()
    for obj in sorted(operator.cache.all(CLUSTER), key=name_of):
        await operator.reconciler.work(Key("cluster", namespace_of(obj), name_of(obj)))
    for obj in sorted(operator.cache.all(TOPIC), key=name_of):
        await operator.reconciler.work(Key("topic", namespace_of(obj), name_of(obj)))
    for obj in sorted(operator.cache.all(COMPACTION), key=name_of):
        await operator.reconciler.work(Key("compaction", namespace_of(obj), name_of(obj)))


async def rounds(world: World, operator: Operator, count: int = 40) -> None:
    """Turns of the world and of the operator."""
    for _ in range(count):
        await one_round(operator)
        world.turn()


async def until_quiet(world: World, operator: Operator) -> None:
    """Turns until nothing has been written for a while, longer than anybody here waits for anything."""
    quiet = 0
    while quiet < QUIET_ROUNDS:
        before = len(world.requests)
        await rounds(world, operator, 1)
        quiet = 0 if world.writes(before) else quiet + 1
