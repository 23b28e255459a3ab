"""``--print-job``: the same run of a job as a Kubernetes ``Job`` of one pod, whose Spark is in that pod.

It finds the brokers of a ``BrokerCluster`` as every client in a pod does (``docs/kubernetes.md``): its bootstrap Service,
its public CA, the token of the pod's ServiceAccount, which a topic's ``access`` must name. Folders are on a volume of
its own. Everything that the ``restricted`` pod security asks for is there.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from firn_spark.session import LOCAL_MASTER

UID = 10001  # of the image's user
RETRIES = {"load": 0}  # a load that was begun finds its topic not empty; of the others a second try goes on
CONTAINER = "driver"
FAILURES = [  # the first rule that fits: a node that is drained costs no try, and wrong usage stays wrong
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [2]}},
]
OPTIONS = ("--print-job", "--image", "--cluster", "--service-account", "--volume")


def add_options(made: argparse.ArgumentParser) -> None:
    """The options that only concern the printed Job."""
    group = made.add_argument_group("in Kubernetes")
    group.add_argument(
        "--print-job", action="store_true", help="print a Job for `kubectl create -f -`, and do nothing"
    )
    group.add_argument("--image", default="firn-spark", help="of spark/Dockerfile")
    group.add_argument("--cluster", metavar="NAME", default="main", help="the BrokerCluster of its namespace")
    group.add_argument(
        "--service-account", metavar="NAME", default="default", help="who the job is to the brokers"
    )
    group.add_argument(
        "--volume", metavar="CLAIM", help="a PersistentVolumeClaim, mounted at /data for folders"
    )


def job_of(asked: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """The Job that runs with ``arguments``, those of ``OPTIONS`` left out."""
    volumes: list[dict[str, Any]] = [
        {"name": "ca", "configMap": {"name": f"{asked.cluster}-ca"}},
        {
            "name": "token",
            "projected": {"sources": [{"serviceAccountToken": {"path": "token", "audience": "firn.dev"}}]},
        },
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "ca", "mountPath": "/etc/firn/ca", "readOnly": True},
        {"name": "token", "mountPath": "/etc/firn/token", "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if asked.volume:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": asked.volume}})
        mounts.append({"name": "data", "mountPath": "/data"})
    environment = {
        "FIRN_BROKER": f"{asked.cluster}-bootstrap:7700",
        "FIRN_TLS_CA": "/etc/firn/ca/ca.crt",
        "FIRN_TOKEN_FILE": "/etc/firn/token/token",
    }
    container = {
        "name": CONTAINER,
        "image": asked.image,
        "command": ["python", "-m", f"firn_spark.{asked.job}"],
        "args": [*_without(arguments), *([] if asked.master else ["--master", LOCAL_MASTER])],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "serviceAccountName": asked.service_account,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID, "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }  # fmt: skip
    labels = {"app.kubernetes.io/name": "firn-spark", "app.kubernetes.io/component": asked.job}
    retries = RETRIES.get(asked.job, 3)
    # With no try left every pod that is lost must count: an ignored one is made anew.
    policy = {"podFailurePolicy": {"rules": FAILURES}} if retries else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": f"firn-{asked.job.replace('_', '-')}-", "labels": labels},
        "spec": {
            "backoffLimit": retries,
            **policy,
            "ttlSecondsAfterFinished": 7 * 86_400,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _without(arguments: Sequence[str]) -> list[str]:
    """The arguments without those of ``OPTIONS``."""
    found, is_value = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value or name in OPTIONS:
            is_value = not is_value and not equals and name != "--print-job"
            continue
        found.append(argument)
    return found
