"""Whose tokens a run of Spark in Kubernetes shows to the brokers.

The operator makes both ServiceAccounts when a run of the topic begins, and they go with the run's resource; the brokers
let them read and compact that one topic. Both sides know them by their names.
"""

import hashlib

_NAME_MAX = 100  # so that a namespace and the name together are no longer than a principal may be


def driver_account(topic: str) -> str:
    """The ServiceAccount of a topic's drivers."""
    return f"firn-driver-{_short(topic)}"


def executor_account(topic: str) -> str:
    """The ServiceAccount of the executors that a topic's drivers start; it has no rights in Kubernetes."""
    return f"firn-executor-{_short(topic)}"


def principals_of_runs(namespace: str, topic: str) -> list[str]:
    """Both, as brokers know them."""
    return [
        f"system:serviceaccount:{namespace}:{name}"
        for name in (driver_account(topic), executor_account(topic))
    ]


def _short(topic: str) -> str:
    if len(topic) <= _NAME_MAX:
        return topic
    return f"{topic[: _NAME_MAX - 17].rstrip('-.')}-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"
