"""What a broker knows from being in a pod: its namespace, its ordinal, and how much memory it may use."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from firn.errors import Invalid
from firn_node.config import BY_NAME, Configuration
from firn_node.settings import BrokerSettings, MemorySettings

POD_NAME, POD_NAMESPACE = "POD_NAME", "POD_NAMESPACE"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CGROUPS = Path("/sys/fs/cgroup")
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")  # of version 2, of version 1
_UNLIMITED = 1 << 60

# Of a limit, this is not for budgets: the process with its kernels (130 MiB), a compaction, and what the allocator
# holds; of the rest one half, so that a budget that is passed for a moment ends nobody. 512 MiB give the defaults.
_FIXED_BYTES = 220 << 20
_SHARE = 0.5
_BUDGETS_MIN, _BUDGETS_MAX = 24 << 20, 8 << 30


def placed(found: Configuration, environment: Mapping[str, str]) -> BrokerSettings:
    """The settings of a replica whose group records are in Kubernetes, with what its pod tells.

    Errors: Invalid, naming what is missing.
    """
    settings, place = found.settings, found.settings.group
    assert place is not None
    if not place.cluster:
        raise Invalid(
            "no cluster: with --coordinator kubernetes give the BrokerCluster's name as --cluster or $FIRN_CLUSTER"
        )
    pod = environment.get(POD_NAME, "")
    if "ordinal" not in found.sources:
        match = re.fullmatch(r".+-(\d+)", pod)
        if match is None:
            raise Invalid(f"${POD_NAME}: expected a StatefulSet's pod, as main-0-1, found {pod!r}")
        place = replace(place, ordinal=int(match[1]))
    namespace = environment.get(POD_NAMESPACE) or _namespace_of_account()
    if not namespace:
        raise Invalid(f"no namespace: set ${POD_NAMESPACE} by the downward API (metadata.namespace)")
    node = settings.node if "node" in found.sources or not pod else pod
    limit = memory_limit()
    if limit is not None:
        wanted = budgets(limit)
        given = {BY_NAME[name].target for name in found.sources}
        unsaid = {
            f.name: getattr(wanted, f.name) for f in fields(MemorySettings) if f"memory.{f.name}" not in given
        }
        settings = replace(settings, memory=replace(settings.memory, **unsaid))
    return replace(settings, node=node, group=replace(place, namespace=namespace))


def _namespace_of_account() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return ""


def memory_limit(cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that the container may use; None without a limit."""
    for name in _LIMIT_FILES:
        try:
            text = (cgroups / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            return int(text)
    return None


def budgets(limit_bytes: int) -> MemorySettings:
    """The defaults, each as many times itself as all of them have room below a limit."""
    defaults = MemorySettings()
    names = [f.name for f in fields(MemorySettings)]
    wanted = min(max((limit_bytes - _FIXED_BYTES) * _SHARE, _BUDGETS_MIN), _BUDGETS_MAX)
    times = wanted / sum(getattr(defaults, name) for name in names)
    return MemorySettings(**{name: int(getattr(defaults, name) * times) for name in names})
