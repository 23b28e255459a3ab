"""``firn status`` of a cluster in Kubernetes: what its resources say, as one document and as tables.

The document is pure in what kubectl shows and the time; the brokers' own status stands beside it.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from firn.cli.kube.finding import Object, belongs_to, broker_pods, is_set, is_topic_of, of_kind
from firn.cli.tables import print_table

CONDITIONS = ("Ready", "Progressing", "Degraded")


def resources_document(cluster: Object, objects: Iterable[Object], now: datetime) -> dict[str, Any]:
    """What the resources of a cluster say. Ages in seconds."""
    kept = list(objects)
    meta, spec, status = cluster["metadata"], cluster.get("spec") or {}, cluster.get("status") or {}
    claims = {item["metadata"]["name"]: item for item in of_kind(kept, "PersistentVolumeClaim")}
    groups = [item for item in of_kind(kept, "BrokerGroup") if belongs_to(item, cluster)]
    topics = [item for item in of_kind(kept, "CompactedTopic") if is_topic_of(item, cluster)]
    return {
        "cluster": meta["name"],
        "namespace": meta["namespace"],
        "age": _age(meta, now),
        "phase": status.get("phase"),
        "groups_wished": spec.get("groups"),
        "replicas_wished": spec.get("replicas"),
        "image": spec.get("image"),
        "is_paused": is_set(cluster, "paused"),
        "is_hibernated": is_set(cluster, "hibernate"),
        "generation_seen": status.get("observedGeneration") == meta.get("generation"),
        "plan": list(status.get("plan") or ()),
        "conditions": _conditions(cluster),
        "groups": [_group(item, cluster) for item in sorted(groups, key=_group_number)],
        "pods": [_pod(pod, claims, now) for pod in broker_pods(of_kind(kept, "Pod"), cluster)],
        "topics": [_topic(item) for item in sorted(topics, key=lambda item: str(item["metadata"]["name"]))],
    }


def _age(meta: Mapping[str, Any], now: datetime) -> int | None:
    created = meta.get("creationTimestamp")
    return None if created is None else max(0, int((now - datetime.fromisoformat(created)).total_seconds()))


def _conditions(item: Object) -> list[dict[str, Any]]:
    found = (item.get("status") or {}).get("conditions") or ()
    order = {name: at for at, name in enumerate(CONDITIONS)}
    rows = [
        {name: condition.get(name) for name in ("type", "status", "reason", "message", "lastTransitionTime")}
        for condition in found
    ]
    return sorted(rows, key=lambda row: (order.get(str(row["type"]), len(order)), str(row["type"])))


def _condition(item: Object, kind: str) -> Mapping[str, Any]:
    return next((row for row in _conditions(item) if row["type"] == kind), {})


def _group_number(group: Object) -> int:
    return int((group.get("spec") or {}).get("group", 0))


def _group(group: Object, cluster: Object) -> dict[str, Any]:
    spec, status = group.get("spec") or {}, group.get("status") or {}
    return {
        "name": group["metadata"]["name"],
        "group": _group_number(group),
        "master": status.get("currentMaster"),
        "target_master": status.get("targetMaster"),
        "epoch": status.get("epoch"),
        "in_sync": list(status.get("inSync") or ()),
        "replicas": spec.get("replicas"),
        "ready_replicas": status.get("readyReplicas"),
        "conditions": _conditions(group),
    }


def _pod(pod: Object, claims: Mapping[str, Object], now: datetime) -> dict[str, Any]:
    meta, status = pod["metadata"], pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    claim = claims.get(f"data-{meta['name']}")
    waiting: Mapping[str, Any] = next(
        (c["state"]["waiting"] for c in containers if "waiting" in (c.get("state") or {})), {}
    )
    return {
        "name": meta["name"],
        "phase": "Terminating"
        if "deletionTimestamp" in meta
        else waiting.get("reason") or status.get("phase"),
        "is_ready": any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()
        ),
        "restarts": sum(int(c.get("restartCount", 0)) for c in containers),
        "node": (pod.get("spec") or {}).get("nodeName"),
        "age": _age(meta, now),
        "volume": None if claim is None else _volume(claim),
        "reason": waiting.get("message") or _not_scheduled(status),
    }


def _volume(claim: Object) -> str:
    status = claim.get("status") or {}
    size = (status.get("capacity") or {}).get("storage")
    return " ".join(str(part) for part in (size, status.get("phase")) if part)


def _not_scheduled(status: Mapping[str, Any]) -> str | None:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message"))
    return None


def _topic(topic: Object) -> dict[str, Any]:
    status, ready, applied = (
        topic.get("status") or {},
        _condition(topic, "Ready"),
        _condition(topic, "Applied"),
    )
    worst = next((c for c in (applied, ready) if c.get("status") == "False"), ready)
    return {
        "name": topic["metadata"]["name"],
        "partitions": status.get("partitions", topic["spec"].get("partitions")),
        "min_in_sync": status.get("minInSync"),
        "ready": ready.get("status"),
        "reason": worst.get("reason"),
        "message": worst.get("message"),
        "is_deleted": "deletionTimestamp" in topic["metadata"],
    }


def age_text(seconds: object) -> str:
    """``3d``, ``5h``, ``12m``, ``7s``."""
    if not isinstance(seconds, int):
        return "-"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def print_resources(found: Mapping[str, Any]) -> None:
    """The cluster in a sentence, its conditions, groups, pods and topics."""
    _print_head(found)
    if found["conditions"]:
        print()
        columns = [("CONDITION", "l"), ("STATUS", "l"), ("REASON", "l"), ("MESSAGE", "l")]
        print_table(
            columns, [(c["type"], c["status"], c["reason"], c["message"]) for c in found["conditions"]]
        )
    print()
    columns = [
        ("GROUP", "l"), ("MASTER", "l"), ("EPOCH", "r"), ("IN SYNC", "l"), ("READY", "r"), ("NOTE", "l")
    ]  # fmt: skip
    rows = [
        (g["name"], g["master"], g["epoch"], ", ".join(g["in_sync"]) or "-",
         f"{_number(g['ready_replicas'])}/{_number(g['replicas'])}", _group_note(g))
        for g in found["groups"]
    ]  # fmt: skip
    print_table(columns, rows)
    print()
    columns = [
        ("POD", "l"), ("STATUS", "l"), ("READY", "l"), ("RESTARTS", "r"), ("NODE", "l"), ("AGE", "r"),
        ("VOLUME", "l"), ("REASON", "l"),
    ]  # fmt: skip
    pods = [
        (p["name"], p["phase"], "yes" if p["is_ready"] else "no", p["restarts"], p["node"], age_text(p["age"]),
         p["volume"], p["reason"] or "")
        for p in found["pods"]
    ]  # fmt: skip
    print_table(columns, pods)
    if found["topics"]:
        print()
        columns = [("TOPIC", "l"), ("PARTITIONS", "r"), ("MIN IN SYNC", "r"), ("READY", "l"), ("REASON", "l")]
        print_table(
            columns,
            [
                (
                    t["name"],
                    t["partitions"],
                    t["min_in_sync"],
                    "deleting" if t["is_deleted"] else t["ready"],
                    _topic_note(t),
                )
                for t in found["topics"]
            ],
        )


def _print_head(found: Mapping[str, Any]) -> None:
    ready: Mapping[str, Any] = next((c for c in found["conditions"] if c["type"] == "Ready"), {})
    states = {"True": "is ready", "False": "is not ready"}
    state = states.get(str(ready.get("status")), "has no word from the operator yet")
    told = f": {ready['message']}" if ready.get("message") else ""
    print(f"cluster {found['namespace']}/{found['cluster']} {state}{told}")
    facts = [
        f"phase {found['phase']}" if found["phase"] else "",
        f"{_counted(found['groups_wished'], 'group')} of {_counted(found['replicas_wished'], 'replica')}",
        f"image {found['image']}" if found["image"] else "",
        f"age {age_text(found['age'])}",
    ]
    print("  " + ", ".join(fact for fact in facts if fact))
    if found["is_paused"]:
        print("  paused: the operator changes nothing; `firn resume` ends it")
    if found["is_hibernated"]:
        print("  hibernated: no pods, volumes are kept; `firn wake` starts it")
    if not found["generation_seen"]:
        print("  the operator has not acted on the newest change of the resource yet")
    for step in found["plan"]:
        print(f"  next: {step}")


def _group_note(group: Mapping[str, Any]) -> str:
    notes = []
    if group["target_master"] and group["target_master"] != group["master"]:
        notes.append(f"switching over to {group['target_master']}")
    degraded = next(
        (c for c in group["conditions"] if c["type"] == "Degraded" and c["status"] == "True"), None
    )
    if degraded is not None:
        notes.append(str(degraded["message"]))
    return "; ".join(notes)


def _topic_note(topic: Mapping[str, Any]) -> str:
    if topic["ready"] == "True":
        return str(topic["reason"] or "")
    return ": ".join(str(part) for part in (topic["reason"], topic["message"]) if part)


def _counted(count: object, what: str) -> str:
    return f"{_number(count)} {what}{'' if count == 1 else 's'}"


def _number(value: object) -> str:
    return "-" if value is None else str(value)
