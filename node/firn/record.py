"""The record as people see it, and its one JSON shape."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from firn.batch import Batch
from firn.errors import Invalid


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``value is None`` makes it a tombstone; ``timestamp`` is ms since 1970."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes
    value: bytes | None
    tag: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    queues: tuple[str, ...] = ()
    id: str | None = None  # message id, where the reader was told it

    def document(self) -> dict[str, Any]:
        """The JSON object, keys in their fixed order; bytes that are not UTF-8 go as ``*_base64``."""
        found: dict[str, Any] = {
            "topic": self.topic, "partition": self.partition, "offset": self.offset, "timestamp": self.timestamp,
        }  # fmt: skip
        _put_bytes(found, "key", self.key)
        _put_bytes(found, "value", self.value)
        found["tag"] = self.tag
        found["headers"] = self.headers
        if self.queues:
            found["queues"] = list(self.queues)
        return found


def _put_bytes(into: dict[str, Any], name: str, raw: bytes | None) -> None:
    try:
        into[name] = None if raw is None else raw.decode()
    except UnicodeDecodeError:
        into[f"{name}_base64"] = base64.b64encode(raw or b"").decode()


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to be produced; ``partition`` or ``timestamp`` None: chosen by the producer."""

    key: bytes
    value: bytes | None
    partition: int | None = None
    timestamp: int | None = None
    tag: str | None = None
    headers: dict[str, str] | None = None
    queues: tuple[str, ...] = ()


def parse_document(document: Any) -> NewRecord:
    """A record from its JSON object; only ``key`` or ``key_base64`` is required, others are ignored.

    Errors: Invalid, naming the field.
    """
    if not isinstance(document, dict):
        raise Invalid(f"a record is a JSON object, not {type(document).__name__}")
    key = _get_bytes(document, "key")
    if key is None:
        raise Invalid('a record needs "key" or "key_base64"; null keys are refused')
    partition, timestamp = _get_int(document, "partition"), _get_int(document, "timestamp")
    tag, headers, queues = document.get("tag"), document.get("headers"), document.get("queues") or ()
    if tag is not None and not isinstance(tag, str):
        raise Invalid(f'"tag": expected a string or null, found {tag!r}')
    if headers is not None and not (
        isinstance(headers, dict) and all(isinstance(v, str) for v in headers.values())
    ):
        raise Invalid(f'"headers": expected an object of strings, found {headers!r}')
    if not isinstance(queues, list | tuple) or not all(isinstance(q, str) for q in queues):
        raise Invalid(f'"queues": expected a list of names, found {queues!r}')
    return NewRecord(key, _get_bytes(document, "value"), partition, timestamp, tag, headers or None, tuple(queues))


def _get_bytes(document: dict[str, Any], name: str) -> bytes | None:
    encoded = document.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (ValueError, TypeError) as error:
            raise Invalid(f'"{name}_base64": not base64: {error}') from error
    text = document.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise Invalid(f'"{name}": expected a string, found {text!r}')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f'"{name}": not valid Unicode: {error}; use "{name}_base64"') from error


def _get_int(document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63):
        return value
    raise Invalid(f'"{name}": expected an integer, found {value!r}')


def records_of(batch: Batch, topic: str, *, start: int = 0) -> Iterator[Record]:
    """The records of a batch from offset ``start`` on, in offset order."""
    h = batch.header
    rows = zip(
        batch.columns.offsets.tolist(), batch.columns.timestamps.tolist(), batch.key_list(), batch.value_list(),
        batch.tag_list(), batch.header_list(), batch.queue_list(), strict=True,
    )  # fmt: skip
    for offset, timestamp, key, value, tag, headers, queues in rows:
        if offset >= start:
            yield Record(topic, h.partition, offset, timestamp, key, value, tag, headers, queues)
