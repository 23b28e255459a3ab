"""A run of Spark as objects, tabled in ``docs/kubernetes.md``: a Job whose one pod is the driver, and what that needs.

The driver works in client mode: no Spark has to be in Kubernetes already. With the runner ``job`` it starts executors as
pods by itself, with ``local`` it does their work in its own pod. The Job brings retries and a deadline; a driver that
begins again names the same run, so the brokers give it the plan that it has, and tell it when that is done.

Objects are named after the run and its uid, so that a run that is made anew under an old name meets nothing of the old
one. The two ServiceAccounts are named after the topic, because that is how the brokers know them; all are owned by the run.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firn.engines import Runner
from firn.runs import driver_account, executor_account
from firn_operator.kube import (
    CONFIG_MAP,
    JOB,
    NETWORK_POLICY,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Kind,
    Obj,
)  # fmt: skip
from firn_operator.names import (
    API_VERSION,
    CLIENT_PORT,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_RUN,
    MANAGER,
    SPARK_CLUSTER_ROLE,
    TOKEN_AUDIENCE,
    USER,
    bootstrap_name,
    ca_name,
)
from firn_operator.same import digest, quantity, sealed
from firn_operator.spec import ClusterSpec

DRIVER_PORT, BLOCK_PORT = 7078, 7079  # dialled by executors, so they cannot be random behind a NetworkPolicy
DEADLINE_S = 24 * 3600  # no run takes as long; one that hangs goes on for ever without it
TASK_FAILURES = 8  # the attempts of a task: an executor that is lost costs one of each task that it had
RETRIES = 3  # of a driver; a run goes on where the last one was, and a failure that lasts shows soon
KEPT_S = 3600  # a Job that ended, with its driver's log
HEAP_MIN = 480 << 20  # Spark begins with no less
HEAP_SHARE = 0.4  # of an executor's memory: keys are held by Python, the JVM only moves control messages
DRIVER_MEMORY, DRIVER_HEAP = 1536 << 20, 512 << 20  # of one that has executors
DRIVER_CPU = "300m"
CONF_FOLDER, CA_FOLDER, TOKEN_FOLDER = "/etc/firn/spark", "/etc/firn/ca", "/etc/firn/token"
TEMPLATE_FILE, EXECUTOR, DRIVER = "executor.yaml", "executor", "driver"
_WRONG_USAGE = 2  # the exit code (docs/spark-compaction.md): another try would be told the same
_FAILURES = [  # the first rule that fits: a node that is drained is no failure of the run
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": DRIVER, "operator": "In", "values": [_WRONG_USAGE]},
    },
]
MASTER = "k8s://https://kubernetes.default.svc:443"
TOKEN_S = 3600  # the kubelet renews it
_PREFIX_MAX = 40  # Spark adds the number of an executor, and a pod's name is a host's

# C1 alone: the JVM works for seconds, in which the optimising compiler costs more than it saves.
_JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:+ExitOnOutOfMemoryError"
_LOG4J = """rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
logger.k8s.name = org.apache.spark.scheduler.cluster.k8s
logger.k8s.level = info
"""


@dataclass(frozen=True, slots=True)
class Wish:
    """``spec.spark`` of a ForceCompaction, defaults filled in."""

    runner: Runner | None  # None: by bytes
    executors: int
    cores: int  # of each executor, or of a driver that works alone
    memory: int  # bytes, likewise


def parse_wish(value: Mapping[str, Any]) -> Wish:
    runner = value.get("runner")
    memory = quantity(value.get("memory", "2Gi"))
    return Wish(
        runner if runner in ("job", "local") else None, int(value.get("executors", 2)), int(value.get("cores", 1)),
        int(memory) if memory is not None else 2 << 30,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SparkRun:
    """One run, as it is to be rendered."""

    name: str
    uid: str
    topic: str
    topic_uid: str
    runner: Runner
    wish: Wish
    image: str
    cluster: ClusterSpec = field(hash=False)

    @property
    def namespace(self) -> str:
        return self.cluster.namespace

    @property
    def has_executors(self) -> bool:
        return self.runner == "job"


def run_base(name: str, uid: str) -> str:
    """The name of a run's objects, and the prefix of its executors' pods: a DNS label that begins with a letter."""
    said = re.sub(r"[^a-z0-9]+", "-", name.lower())[: _PREFIX_MAX - 10].strip("-")
    return f"fc-{said}-{digest(uid)[:6]}"


def run_objects(run: SparkRun) -> list[Obj]:
    """All of a run, the Job last: it finds the others when it begins."""
    made = [_account(run, driver_account(run.topic)), _configuration(run)]
    if run.has_executors:
        made += [_account(run, executor_account(run.topic)), _driver_rights(run)]
        if run.cluster.has_network_policy:
            made.append(_policy(run))
    return [sealed(each) for each in (*made, _job(run))]


def _object(run: SparkRun, kind: Kind, name: str, **fields: Any) -> Obj:
    owner = {"apiVersion": API_VERSION, "kind": "ForceCompaction", "name": run.name, "uid": run.uid}
    meta: Obj = {
        "name": name, "namespace": run.namespace, "labels": {**_labels(run), LABEL_MANAGED_BY: MANAGER},
        "ownerReferences": [owner],
    }  # fmt: skip
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, **fields}


def _labels(run: SparkRun) -> dict[str, str]:
    return {LABEL_NAME: "firn", LABEL_COMPONENT: "spark", LABEL_RUN: run_base(run.name, run.uid)}


def _account(run: SparkRun, name: str) -> Obj:
    """The topic's, as its name: to hand it from run to run would take the right to delete accounts."""
    made = _object(run, SERVICE_ACCOUNT, name, automountServiceAccountToken=False)
    del made["metadata"]["labels"][LABEL_RUN]
    owner = {"apiVersion": API_VERSION, "kind": "CompactedTopic", "name": run.topic, "uid": run.topic_uid}
    made["metadata"]["ownerReferences"] = [owner]
    return made


def _driver_rights(run: SparkRun) -> Obj:
    return _object(
        run, ROLE_BINDING, run_base(run.name, run.uid),
        subjects=[{"kind": "ServiceAccount", "name": driver_account(run.topic), "namespace": run.namespace}],
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": SPARK_CLUSTER_ROLE},
    )  # fmt: skip


def _policy(run: SparkRun) -> Obj:
    """Pods of a run are dialled by pods of the same run alone."""
    own = {"matchLabels": _labels(run)}
    return _object(
        run, NETWORK_POLICY, run_base(run.name, run.uid),
        spec={"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]},
    )  # fmt: skip


# What Spark reads.


def _configuration(run: SparkRun) -> Obj:
    data = {
        "spark-defaults.conf": "".join(f"{name} {value}\n" for name, value in sorted(conf_of(run).items())),
        "log4j2.properties": _LOG4J,
    }
    if run.has_executors:
        data[TEMPLATE_FILE] = json.dumps(executor_template(run), indent=1, sort_keys=True) + "\n"
    return _object(run, CONFIG_MAP, run_base(run.name, run.uid), data=data)


def conf_of(run: SparkRun) -> dict[str, str]:
    """Spark's settings, but for those that a driver's pod knows when it begins."""
    conf = {
        "spark.driver.memory": f"{_driver_heap(run) >> 20}m",
        "spark.driver.extraJavaOptions": _JAVA_OPTIONS,
        "spark.ui.enabled": "false",
        "spark.speculation": "false",  # two attempts of a task would do the same work twice, and agree
        "spark.task.maxFailures": str(TASK_FAILURES),
    }
    if not run.has_executors:
        return conf
    heap = _heap(run.wish.memory)
    conf |= {
        "spark.submit.deployMode": "client",
        "spark.driver.port": str(DRIVER_PORT),
        "spark.driver.blockManager.port": str(BLOCK_PORT),
        "spark.blockManager.port": str(BLOCK_PORT),
        # Driver and executors take tasks from one another: whoever speaks to them has the secret of this run.
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        "spark.executor.instances": str(run.wish.executors),
        "spark.executor.cores": str(run.wish.cores),
        "spark.executor.memory": f"{heap >> 20}m",
        "spark.executor.memoryOverhead": f"{(run.wish.memory - heap) >> 20}m",
        "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
        "spark.kubernetes.namespace": run.namespace,
        "spark.kubernetes.container.image": run.image,
        "spark.kubernetes.container.image.pullPolicy": run.cluster.pull_policy,
        "spark.kubernetes.authenticate.executor.serviceAccountName": executor_account(run.topic),
        "spark.kubernetes.executor.podNamePrefix": run_base(run.name, run.uid),
        "spark.kubernetes.executor.podTemplateFile": f"{CONF_FOLDER}/{TEMPLATE_FILE}",
        "spark.kubernetes.executor.podTemplateContainerName": EXECUTOR,
        # Fewer rights: no ConfigMaps, Services or claims are made for executors.
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
    }
    if run.cluster.pull_secrets:
        conf["spark.kubernetes.container.image.pullSecrets"] = ",".join(run.cluster.pull_secrets)
    return conf


def _heap(memory: int) -> int:
    return max(HEAP_MIN, int(memory * HEAP_SHARE))


def _driver_heap(run: SparkRun) -> int:
    return DRIVER_HEAP if run.has_executors else _heap(run.wish.memory)


def executor_template(run: SparkRun) -> Obj:
    """The pod that Spark adds its own to: images, resources and addresses are its business."""
    container: Obj = {
        "name": EXECUTOR, "env": _broker_environment(run), "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": _mounts(run),
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"labels": _labels(run)},
        "spec": {**_pod_security(), "containers": [container], "volumes": _volumes(run)},
    }  # fmt: skip


# The driver.


def _job(run: SparkRun) -> Obj:
    return _object(
        run, JOB, run_base(run.name, run.uid),
        spec={
            "backoffLimit": RETRIES,
            "podFailurePolicy": {"rules": _FAILURES},
            "activeDeadlineSeconds": DEADLINE_S,
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {"metadata": {"labels": _labels(run)}, "spec": _driver_pod(run)},
        },
    )  # fmt: skip


def _driver_pod(run: SparkRun) -> Obj:
    configuration = {"name": "spark", "configMap": {"name": run_base(run.name, run.uid)}}
    pod: Obj = {
        **_pod_security(),
        "restartPolicy": "Never",
        "serviceAccountName": driver_account(run.topic),
        "automountServiceAccountToken": run.has_executors,  # it asks Kubernetes for their pods
        "containers": [_driver(run)],
        "volumes": [*_volumes(run), configuration],
    }
    if run.cluster.pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in run.cluster.pull_secrets]
    return pod


def _driver(run: SparkRun) -> Obj:
    master = MASTER if run.has_executors else f"local[{run.wish.cores},{TASK_FAILURES}]"
    memory = DRIVER_MEMORY if run.has_executors else run.wish.memory
    cpu = DRIVER_CPU if run.has_executors else str(run.wish.cores)
    limits = {"memory": f"{memory >> 20}Mi"}
    return {
        "name": DRIVER,
        "image": run.image,
        "imagePullPolicy": run.cluster.pull_policy,
        "args": ["python", "-m", "firn_spark.force_compaction", run.topic, "--run", run.uid, "--master", master],
        "env": [*_broker_environment(run), *_driver_environment(run)],
        "ports": [
            {"name": "driver", "containerPort": DRIVER_PORT, "protocol": "TCP"},
            {"name": "blocks", "containerPort": BLOCK_PORT, "protocol": "TCP"},
        ] if run.has_executors else [],
        "resources": {"requests": {"cpu": cpu, **limits}, "limits": limits},
        "terminationMessagePolicy": "FallbackToLogsOnError",  # its last words are in the run's status
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [*_mounts(run), {"name": "spark", "mountPath": CONF_FOLDER, "readOnly": True}],
    }  # fmt: skip


def _driver_environment(run: SparkRun) -> list[Obj]:
    found: list[Obj] = [{"name": "SPARK_CONF_DIR", "value": CONF_FOLDER}]
    if not run.has_executors:
        return found
    for variable, path in (("POD_IP", "status.podIP"), ("POD_NAME", "metadata.name")):
        source = {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}
        found.append({"name": variable, "valueFrom": source})
    told = {
        "spark.driver.host": "$(POD_IP)",
        "spark.driver.bindAddress": "$(POD_IP)",
        "spark.kubernetes.driver.pod.name": "$(POD_NAME)",  # owns the executors: they go with it
    }
    words = [f"--conf {name}={value}" for name, value in told.items()]
    return [*found, {"name": "PYSPARK_SUBMIT_ARGS", "value": " ".join([*words, "pyspark-shell"])}]


# What all pods of a run have.

_CONTAINER_SECURITY: Obj = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _pod_security() -> Obj:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip


def _broker_environment(run: SparkRun) -> list[Obj]:
    """How brokers are found and trusted, in the names of the ``firn`` command."""
    cluster = run.cluster
    told = {"FIRN_BROKER": f"{bootstrap_name(cluster.name)}.{cluster.namespace}.svc:{CLIENT_PORT}"}
    if not cluster.is_insecure:
        told |= {"FIRN_TLS_CA": f"{CA_FOLDER}/ca.crt", "FIRN_TOKEN_FILE": f"{TOKEN_FOLDER}/token"}
    return [{"name": name, "value": value} for name, value in told.items()]


def _volumes(run: SparkRun) -> list[Obj]:
    found: list[Obj] = [{"name": "tmp", "emptyDir": {}}]
    if not run.cluster.is_insecure:
        token = {"path": "token", "audience": TOKEN_AUDIENCE, "expirationSeconds": TOKEN_S}
        found += [
            {"name": "ca", "configMap": {"name": ca_name(run.cluster.name)}},
            {"name": "token", "projected": {"sources": [{"serviceAccountToken": token}]}},
        ]
    return found


def _mounts(run: SparkRun) -> list[Obj]:
    found: list[Obj] = [{"name": "tmp", "mountPath": "/tmp"}]
    if not run.cluster.is_insecure:
        found += [
            {"name": "ca", "mountPath": CA_FOLDER, "readOnly": True},
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
        ]
    return found
