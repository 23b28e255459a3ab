"""Records as lines of output: JSON of one fixed shape, or key, separator, value.

``json_line`` gives the same text as ``json.dumps(record.document())`` with compact separators and plain UTF-8; it
is written out because printing is the slowest step of a long `firn consume` (about a third of the time of dumps).
"""

import json
from json.encoder import encode_basestring

from firn.record import Record


def compact_json(document: object) -> str:
    """One line of JSON, UTF-8 as it is."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def print_document(document: object, output: str | None) -> bool:
    """Print it as JSON or YAML, where one of these is asked for; False: it is for a person to read."""
    if output == "json":
        print(_encodable(compact_json(document)))
    elif output == "yaml":
        import yaml  # not needed by a command that prints a table

        plain = json.loads(compact_json(document))
        print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")
    return output in ("json", "yaml")


def _encodable(text: str) -> str:
    """JSON whose bytes of file names that are no UTF-8 are escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def json_line(record: Record) -> str:
    """The record's JSON object and a newline."""
    if record.queues:
        return compact_json(record.document()) + "\n"
    try:
        key = encode_basestring(record.key.decode())
        value = "null" if record.value is None else encode_basestring(record.value.decode())
    except UnicodeDecodeError:
        return compact_json(record.document()) + "\n"
    tag = "null" if record.tag is None else encode_basestring(record.tag)
    headers = compact_json(record.headers) if record.headers else "{}"
    return (
        f'{{"topic":"{record.topic}","partition":{record.partition},"offset":{record.offset},'
        f'"timestamp":{record.timestamp},"key":{key},"value":{value},"tag":{tag},"headers":{headers}}}\n'
    )


def json_bytes(record: Record) -> bytes:
    return json_line(record).encode()


def json_bytes_with_id(record: Record) -> bytes:
    """The record's JSON object with its message id as the last key, and a newline."""
    return (compact_json({**record.document(), "id": record.id}) + "\n").encode()


def tsv_bytes(record: Record, separator: bytes = b"\t") -> bytes:
    """Key, separator, value and a newline; a tombstone has an empty value. Bytes as they are."""
    return record.key + separator + (record.value or b"") + b"\n"
