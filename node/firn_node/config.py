"""Settings of ``firn up``: flags, then the ``--config`` file, then ``FIRN_...`` variables, then defaults.

One table names every setting; flags, file keys, variables and the documentation in ``docs/operating.md`` follow
from it. A setting ``flushInterval`` is the flag ``--flush-interval``, the key ``flushInterval`` of the file and
the variable ``FIRN_FLUSH_INTERVAL`` (variables of TLS begin with ``FIRN_SERVER_``). Unknown names of flags and of
the file are refused by name. Unknown ``FIRN_...`` variables are only reported: Kubernetes sets some by itself for a
service that is called firn.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import yaml

from firn.errors import Invalid
from firn.tls import is_loopback
from firn.units import duration_ms, duration_text, size_bytes, size_text
from firn_node.settings import KUBERNETES, BrokerSettings, GroupSettings, MemorySettings, SecuritySettings

INDEX_KINDS = ("rocksdb", "files", "mirrored")
# Variables of the same prefix that are no settings of a broker.
OTHER_VARIABLES = (
    "FIRN_BROKER", "FIRN_DEBUG", "FIRN_FAILPOINT", "FIRN_FAULTS", "FIRN_CONFIG", "FIRN_GROUPS", "FIRN_LOG",
    "FIRN_TOKEN", "FIRN_TOKEN_FILE",
)  # fmt: skip
_SERVICE_LINK = re.compile(r"FIRN_(.+_)?(SERVICE_HOST|SERVICE_PORT.*|PORT(_.*)?)")


def _whole(value: object, *, field: str, least: int = 0) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise Invalid(f"{field}: expected a whole number of {least} or more, found {value!r}")


def _positive(value: object, *, field: str) -> int:
    return _whole(value, field=field, least=1)


def _ratio(value: object, *, field: str) -> float:
    try:
        found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except ValueError:
        found = -1.0
    if 0 <= found <= 1:
        return found
    raise Invalid(f"{field}: expected a number from 0 to 1, found {value!r}")


def _text(value: object, *, field: str) -> str:
    if isinstance(value, str) and value:
        return value
    raise Invalid(f"{field}: expected text, found {value!r}")


def _path(value: object, *, field: str) -> str:
    return os.path.abspath(os.path.expanduser(_text(value, field=field)))


def _coordinator(value: object, *, field: str) -> str:
    return KUBERNETES if value == KUBERNETES else _path(value, field=field)


def _index(value: object, *, field: str) -> str:
    if isinstance(value, str) and value in INDEX_KINDS:
        return value
    raise Invalid(f"{field}: expected one of {', '.join(INDEX_KINDS)}, found {value!r}")


def _address(value: object, *, field: str) -> tuple[str, int]:
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise Invalid(f"{field}: {value!r} is not an address; write HOST:PORT (port 0: any free one)")
    return host.strip("[]"), int(port)


def _advertised(value: object, *, field: str) -> str:
    host, port = _address(value, field=field)
    if not port:
        raise Invalid(f"{field}: {value!r} is no address that others can reach; give the port too")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``target``: the field of BrokerSettings, ``memory.`` or ``security.`` before one of these parts."""

    name: str
    target: str | None
    parse: Callable[..., Any]
    help: str
    prefix: str = "FIRN_"  # of its variable

    @property
    def flag(self) -> str:
        return "--" + re.sub(r"([A-Z])", lambda m: "-" + m[1].lower(), self.name)

    @property
    def variable(self) -> str:
        return self.prefix + re.sub(r"([A-Z])", r"_\1", self.name).upper()

    @property
    def parameter(self) -> str:
        return self.flag[2:].replace("-", "_")


# Clients in the same environment have $FIRN_TLS_CERT and its like for credentials of their own.
_SERVER = "FIRN_SERVER_"

SETTINGS = (
    Setting("data", "data", _text, "The data folder; made when it is missing."),
    Setting("listen", None, _address, "HOST:PORT; port 0 takes a free one."),
    Setting("advertise", "advertise", _advertised, "HOST:PORT where clients and replicas find it, if elsewhere."),
    Setting("healthListen", None, _address, "HOST:PORT of a second port for probes and metrics alone, without TLS."),
    Setting("node", "node", _text, "This broker's name in status."),
    Setting("index", "index", _index, "The partition index: rocksdb, files or mirrored."),
    Setting("logSegmentBytes", "log_segment_bytes", size_bytes, "Size of a commit log file; retention frees whole ones."),
    Setting("flushInterval", "flush_interval_ms", duration_ms, "How long records of `flush: interval` may stay unsynced."),
    Setting("checkpointBytes", "checkpoint_bytes", size_bytes, "The index is flushed after so much log."),
    Setting("checkpointInterval", "checkpoint_ms", duration_ms, "The index is flushed at least so often."),
    Setting("minDeadRatio", "min_dead_ratio", _ratio, "Share of dead rows at which a clean segment is rewritten."),
    Setting("reclaimAge", "reclaim_age_ms", duration_ms, "A dead row is off the disk after this and a compaction."),
    Setting("diskReserve", "disk_reserve", _ratio, "Share of the disk below which produces stop."),
    Setting("ioBytesPerSecond", "io_bytes_per_second", size_bytes, "Bound of compaction's reads and writes; 0: none."),
    Setting("compactionCheck", "compaction_check_ms", duration_ms, "How often due partitions are looked for."),
    Setting("openFiles", "open_files_max", _positive, "Open files of the data folder, besides RocksDB's."),
    Setting("connections", "connections_max", _positive, "Connections at once."),
    Setting("snapshotTtl", "snapshot_ttl_ms", duration_ms, "How long an unrenewed snapshot is kept."),
    Setting(
        "planTtl", "plan_ttl_ms", duration_ms, "A compaction by Spark whose driver is silent for so long is dropped."
    ),
    Setting("producerExpiry", "producer_expiry_ms", duration_ms, "A producer unused for so long is forgotten."),
    Setting("indexCache", "memory.index_bytes", size_bytes, "Memory of index caches and write buffers."),
    Setting("activeKeysCache", "memory.active_keys_bytes", size_bytes, "Memory of the key indexes of active segments."),
    Setting("inFlightCache", "memory.in_flight_bytes", size_bytes, "Memory of requests not yet acknowledged."),
    Setting("readsCache", "memory.reads_bytes", size_bytes, "Memory of reads being put together."),
    Setting("tlsCert", "security.tls_cert", _path, "The broker's certificate with its chain (PEM): speak TLS.", _SERVER),
    Setting("tlsKey", "security.tls_key", _path, "Its key (PEM).", _SERVER),
    Setting("tlsCa", "security.tls_ca", _path, "The cluster's own CA (PEM, with its CRL).", _SERVER),
    Setting("tlsClientCa", "security.tls_client_ca", _path, "Further CAs (PEM), for clients alone.", _SERVER),
    Setting("tokens", "security.tokens", _path, "Bearer tokens, hashed (YAML; see `firn token`)."),
    Setting("tokenReview", "security.token_review", _text, "Audience of service accounts' tokens: ask Kubernetes."),
    Setting("auditLog", "security.audit_log", _path, "Audit log; else `audit.log` in the data folder."),
    Setting("coordinator", "group.coordinator", _coordinator, "File of the group records, or kubernetes: be a replica."),
    Setting("cluster", "group.cluster", _text, "With --coordinator kubernetes: the name of its BrokerCluster."),
    Setting("group", "group.group", _whole, "The number of its group."),
    Setting("groupReplicas", "group.replicas", _whole, "How many replicas its group is to have: the default of minInSync."),
    Setting("ordinal", "group.ordinal", _whole, "Its number among the replicas: a lower one stands first."),
    Setting("leaseTtl", "group.lease_ttl_ms", duration_ms, "A master that is silent for so long is replaced."),
    Setting("replicaMaxLag", "group.replica_max_lag_ms", duration_ms, "How long a standby may lag in in_sync; 0: leaseTtl."),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}


def default_text(setting: Setting) -> str:
    """The default as a person would write it; empty where there is none."""
    if setting.name == "listen":
        return "127.0.0.1:7700"
    if setting.target is None or setting.name == "data":
        return ""
    value: Any = BrokerSettings(data="", group=GroupSettings(""))
    for name in setting.target.split("."):
        value = getattr(value, name)
    if setting.parse is duration_ms:
        return duration_text(value)
    if setting.parse is size_bytes:
        return size_text(value)
    return str(value)


def parse_config(text: str, *, source: str) -> dict[str, Any]:
    """The settings of a ``--config`` file, by name, unparsed.

    Errors: Invalid, naming the file and the unknown name.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Invalid(f"{source}: not YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise Invalid(f"{source}: expected a mapping of settings, found {type(document).__name__}")
    for name in document:
        if name not in BY_NAME:
            raise Invalid(f"{source}: {name}: unknown setting; known ones are {', '.join(BY_NAME)}")
    return dict(document)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """``FIRN_...`` variables that set nothing: most likely misspelled."""
    known = {setting.variable for setting in SETTINGS} | set(OTHER_VARIABLES)
    return sorted(
        name for name in environment
        if name.startswith("FIRN_") and name not in known and not _SERVICE_LINK.fullmatch(name)
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Configuration:
    """The broker's settings, and where the value of each that was given came from."""

    settings: BrokerSettings
    sources: dict[str, str]


def configure(
    flags: Mapping[str, Any],
    *,
    file: Mapping[str, Any] | None = None,
    file_name: str = "",
    environment: Mapping[str, str],
) -> Configuration:
    """One broker's settings from all sources; a source named earlier wins.

    Errors: Invalid, naming the setting as it was given, what was expected and what was found; also when no
    data folder is given.
    """
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in SETTINGS:
        variable = environment.get(setting.variable)
        for value, source in (
            (flags.get(setting.name), setting.flag),
            ((file or {}).get(setting.name), f"{file_name}: {setting.name}"),
            (variable or None, f"${setting.variable}"),
        ):
            if value is not None:
                given[setting.name] = setting.parse(value, field=source)
                sources[setting.name] = source
                break
    if "data" not in given:
        raise Invalid("no data folder: give --data DIR, `data` in the --config file or $FIRN_DATA")
    return Configuration(_settings(given), sources)


def _settings(given: Mapping[str, Any]) -> BrokerSettings:
    broker: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {"memory": {}, "security": {}, "group": {}}
    for name, value in given.items():
        target = BY_NAME[name].target
        if name == "listen":
            broker["host"], broker["port"] = value
        elif name == "healthListen":
            broker["health_host"], broker["health_port"] = value
        elif target is not None:
            part, _, field = target.rpartition(".")
            (parts[part] if part else broker)[field] = value
    broker["data"] = os.path.abspath(os.path.expanduser(broker["data"]))
    found = BrokerSettings(
        **broker, memory=MemorySettings(**parts["memory"]), security=SecuritySettings(**parts["security"]),
        group=GroupSettings(**parts["group"]) if "coordinator" in parts["group"] else None,
    )  # fmt: skip
    found.security.check()
    if found.group is not None and not found.port:
        raise Invalid("a replica is known by its address: give --listen with a port, not port 0")
    return found


def check_listen(settings: BrokerSettings) -> None:
    """Refuse to be open by accident.

    Errors: Invalid.
    """
    security = settings.security
    if is_loopback(settings.host) or settings.insecure or (security.has_tls and security.has_authentication):
        return
    missing = [
        name
        for name, given in (
            ("TLS (--tls-cert, --tls-key)", security.has_tls),
            ("authentication (--tls-ca or --tokens)", security.has_authentication),
        )
        if not given
    ]
    raise Invalid(
        f"refusing to listen on {settings.host} without {' and '.join(missing)}: anybody who reaches it could read "
        "or write; give these, listen on 127.0.0.1, or give --insecure where the network is trusted"
    )


def _settable() -> set[str]:
    named = {setting.target for setting in SETTINGS if setting.target}
    return named | {"host", "port", "health_host", "health_port", "memory", "security", "group"}


assert {f.name for f in fields(BrokerSettings)} - {"insecure"} <= _settable(), (
    "a field of BrokerSettings cannot be set"
)
assert {f"memory.{f.name}" for f in fields(MemorySettings)} <= _settable()
assert {f"security.{f.name}" for f in fields(SecuritySettings)} - {"security.local_ca"} <= _settable()
assert {f"group.{f.name}" for f in fields(GroupSettings)} - {"group.groups", "group.namespace"} <= _settable()
