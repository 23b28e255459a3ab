"""The ``CompactedTopic`` document: parsed once, at the edge, into a ``TopicSpec``.

Unknown fields are refused by name. ``access`` is checked by ``firn.access``; ``clusterRef``, ``brokers``,
``forceCompaction`` and ``deletionPolicy`` are the operator's: checked for shape and kept as they are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from firn import limits
from firn.access import parse_access
from firn.errors import Invalid
from firn.units import duration_ms, duration_text, size_bytes, size_text

API_VERSION = "firn.dev/v1alpha1"
KIND = "CompactedTopic"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class CompactionSpec:
    min_dirty_ratio: float = 0.5  # dirty bytes / all bytes past which a partition is due; 1: never by this
    min_lag_ms: int = 0  # younger records are left out, also by force
    max_lag_ms: int = 86_400_000  # an older dirty record makes a partition due
    delete_retention_ms: int = 86_400_000  # how long a covered tombstone stays readable
    backlog_threshold_bytes: int = 1 << 30  # as many dirty bytes make a partition due
    max_segment_age_ms: int = 3_600_000  # an active segment is sealed at this age
    segment_bytes: int = 256 << 20  # size of a compacted segment, and of a dirty one before it is sealed
    memory_bytes: int = 64 << 20  # bound of one compaction's decision


@dataclass(frozen=True, slots=True)
class RetentionSpec:
    time_ms: int = 72 * 3_600_000
    size_bytes: int = 10 << 30


@dataclass(frozen=True, slots=True)
class DurabilitySpec:
    min_in_sync: int = 1
    flush: str = "sync"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    partitions: int = 1
    compaction: CompactionSpec = field(default_factory=CompactionSpec)
    retention: RetentionSpec = field(default_factory=RetentionSpec)
    durability: DurabilitySpec = field(default_factory=DurabilitySpec)
    operator: dict[str, Any] = field(default_factory=dict)  # the operator's fields and ``access``, untouched

    def document(self) -> dict[str, Any]:
        """The spec as YAML and JSON show it; ``parse_spec`` of it gives this spec again."""
        c, r, d = self.compaction, self.retention, self.durability
        return {
            "partitions": self.partitions,
            "compaction": {
                "minDirtyRatio": c.min_dirty_ratio,
                "minLag": duration_text(c.min_lag_ms),
                "maxLag": duration_text(c.max_lag_ms),
                "deleteRetention": duration_text(c.delete_retention_ms),
                "backlogThreshold": size_text(c.backlog_threshold_bytes),
                "maxSegmentAge": duration_text(c.max_segment_age_ms),
                "segmentBytes": size_text(c.segment_bytes),
                "memory": size_text(c.memory_bytes),
            },
            "retention": {"time": duration_text(r.time_ms), "size": size_text(r.size_bytes)},
            "durability": {"minInSync": d.min_in_sync, "flush": d.flush},
            **self.operator,
        }


def _ratio(value: object, *, field: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise Invalid(f"{field}: expected a number from 0 to 1, found {value!r}")


def _count(value: object, *, field: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise Invalid(f"{field}: expected a whole number of 1 or more, found {value!r}")


def _flush(value: object, *, field: str) -> str:
    if value in ("sync", "interval"):
        return str(value)
    raise Invalid(f"{field}: expected sync or interval, found {value!r}")


_COMPACTION = {
    "minDirtyRatio": ("min_dirty_ratio", _ratio),
    "minLag": ("min_lag_ms", duration_ms),
    "maxLag": ("max_lag_ms", duration_ms),
    "deleteRetention": ("delete_retention_ms", duration_ms),
    "backlogThreshold": ("backlog_threshold_bytes", size_bytes),
    "maxSegmentAge": ("max_segment_age_ms", duration_ms),
    "segmentBytes": ("segment_bytes", size_bytes),
    "memory": ("memory_bytes", size_bytes),
}
_RETENTION = {"time": ("time_ms", duration_ms), "size": ("size_bytes", size_bytes)}
_DURABILITY = {"minInSync": ("min_in_sync", _count), "flush": ("flush", _flush)}
_OPERATOR: dict[str, type | tuple[type, ...]] = {
    "clusterRef": dict, "brokers": dict, "forceCompaction": dict, "access": list, "deletionPolicy": str,
}  # fmt: skip
_SECTIONS: dict[str, Mapping[str, Any]] = {
    "compaction": _COMPACTION,
    "retention": _RETENTION,
    "durability": _DURABILITY,
}
_KNOWN = ("partitions", *_SECTIONS, *_OPERATOR)


def _section(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    given, known = document.get(name), _SECTIONS[name]
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Invalid(f"spec.{name}: expected a mapping, found {given!r}")
    unknown = [key for key in given if key not in known]
    if unknown:
        raise Invalid(f"spec.{name}.{unknown[0]}: unknown field; known ones are {', '.join(known)}")
    return {known[key][0]: known[key][1](value, field=f"spec.{name}.{key}") for key, value in given.items()}


def default_min_in_sync(replicas: int) -> int:
    """``minInSync`` of a topic that does not say it, in a group of so many replicas."""
    return 2 if replicas >= 3 else 1


def parse_spec(document: Mapping[str, Any] | None, *, min_in_sync: int = 1) -> TopicSpec:
    """The spec of a topic; what is absent has its default, ``minInSync`` the one that is given.

    Errors: Invalid, naming the field, what was expected and what was found.
    """
    document = {} if document is None else document
    if not isinstance(document, Mapping):
        raise Invalid(f"spec: expected a mapping, found {document!r}")
    unknown = [key for key in document if key not in _KNOWN]
    if unknown:
        raise Invalid(f"spec.{unknown[0]}: unknown field; known ones are {', '.join(_KNOWN)}")
    partitions = _count(document.get("partitions", 1), field="spec.partitions")
    if partitions > limits.PARTITIONS_MAX:
        raise Invalid(f"spec.partitions: {partitions} are too many; at most {limits.PARTITIONS_MAX}")
    for name, kind in _OPERATOR.items():
        if name in document and not isinstance(document[name], kind):
            raise Invalid(f"spec.{name}: found {document[name]!r}, which is of the wrong type")
    parse_access(document.get("access"))
    if document.get("deletionPolicy", "Delete") not in ("Delete", "Retain"):
        raise Invalid(f"spec.deletionPolicy: expected Delete or Retain, found {document['deletionPolicy']!r}")
    compaction = CompactionSpec(**_section(document, "compaction"))
    if compaction.max_lag_ms <= 0 or compaction.max_lag_ms < compaction.min_lag_ms:
        raise Invalid("spec.compaction.maxLag: must be above 0s and not below minLag")
    if compaction.memory_bytes < 64 << 10:
        raise Invalid(
            f"spec.compaction.memory: {size_text(compaction.memory_bytes)} is too little; at least 64Ki"
        )
    if compaction.segment_bytes < 4 << 10:
        raise Invalid(
            f"spec.compaction.segmentBytes: {size_text(compaction.segment_bytes)} is too little; at least 4Ki"
        )
    durability = _section(document, "durability")
    durability.setdefault("min_in_sync", min_in_sync)
    return TopicSpec(
        partitions,
        compaction,
        RetentionSpec(**_section(document, "retention")),
        DurabilitySpec(**durability),
        {name: document[name] for name in _OPERATOR if name in document},
    )


def stored_spec(document: Mapping[str, Any]) -> TopicSpec:
    """The spec that a broker has stored or told: fields that only a newer firn knows are passed over."""
    known = {name: document[name] for name in _KNOWN if name in document}
    for name, section_fields in _SECTIONS.items():
        if isinstance(section := known.get(name), Mapping):
            known[name] = {key: section[key] for key in section_fields if key in section}
    return parse_spec(known)


def check_topic_name(name: object, *, internal: bool = False) -> str:
    """A topic's name, checked. ``__...`` is for internal topics alone.

    Errors: Invalid.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise Invalid(f"topic name {name!r}: expected 1 to 249 of A-Z a-z 0-9 . _ - and neither '.' nor '..'")
    if name.startswith("__") and not internal:
        raise Invalid(f"topic name {name!r}: names that begin with __ are for internal topics")
    return name


@dataclass(frozen=True, slots=True)
class TopicDocument:
    """``spec``: as a broker of its own understands it; ``given``: as it was written."""

    name: str
    spec: TopicSpec
    given: Mapping[str, Any]

    def spec_with(self, min_in_sync: int) -> TopicSpec:
        """The spec, with this ``minInSync`` where the document leaves it out."""
        return parse_spec(self.given, min_in_sync=min_in_sync)


def parse_documents(text: str, *, source: str = "document") -> list[TopicDocument]:
    """The topics of a YAML text, several per text parted by ``---``; empty documents are passed over.

    Errors: Invalid, naming ``source``, the document's number and the field.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise Invalid(f"{source}: not YAML: {error}") from error
    found = []
    for number, document in enumerate(documents, 1):
        if document is None:
            continue
        try:
            found.append(_parse_document(document))
        except Invalid as error:
            raise Invalid(f"{source}, document {number}: {error.message}") from error
    return found


def _parse_document(document: Any) -> TopicDocument:
    if not isinstance(document, Mapping):
        raise Invalid(f"expected a mapping, found {document!r}")
    unknown = [key for key in document if key not in ("apiVersion", "kind", "metadata", "spec", "status")]
    if unknown:
        raise Invalid(f"{unknown[0]}: unknown field; known ones are apiVersion, kind, metadata, spec")
    for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(name) != expected:
            raise Invalid(f"{name}: expected {expected}, found {document.get(name)!r}")
    metadata = document.get("metadata")
    if not isinstance(metadata, Mapping):
        raise Invalid(f"metadata: expected a mapping with a name, found {metadata!r}")
    given = document.get("spec")
    return TopicDocument(check_topic_name(metadata.get("name")), parse_spec(given), given or {})


def set_field(document: dict[str, Any], path: str, value: Any) -> None:
    """Set ``a.b`` in a spec document, as ``--set a.b=value`` and keyword arguments do."""
    *folders, last = path.split(".")
    for folder in folders:
        document = document.setdefault(folder, {})
        if not isinstance(document, dict):
            raise Invalid(f"{path}: {folder} is not a mapping")
    document[last] = value


assert {f.name for f in fields(CompactionSpec)} == {name for name, _ in _COMPACTION.values()}
