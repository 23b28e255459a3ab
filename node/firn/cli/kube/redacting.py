"""What must not leave a cluster in a report, found and taken out. Pure.

Secrets are never asked for; this is for what people put where it does not belong: credentials in environment variables,
in annotations, in log lines.
"""

import re
from collections.abc import Mapping
from typing import Any

TAKEN_OUT = "[taken out]"
_SECRET_NAME = re.compile(r"(?i)(passw|secret|token|credential|api_?key|private_?key|access_?key|\bpwd\b)")
_IN_TEXT = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),  # a JSON Web Token
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/-]{8,}=*"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user and password of a URL
)
# Objects as they were applied: a copy of what is above it, in one string.
_COPIES = ("kubectl.kubernetes.io/last-applied-configuration",)


def redacted_text(text: str) -> str:
    """Text without what looks like a credential."""
    for pattern in _IN_TEXT:
        text = pattern.sub(TAKEN_OUT, text)
    return text


def redacted(item: Any) -> Any:
    """An object of Kubernetes without credentials: values of variables and fields by their names, strings by their looks."""
    if isinstance(item, str):
        return redacted_text(item)
    if isinstance(item, list):
        return [redacted(part) for part in item]
    if not isinstance(item, Mapping):
        return item
    if item.get("kind") == "Secret":
        return {
            "kind": "Secret",
            "metadata": {"name": (item.get("metadata") or {}).get("name")},
            "data": TAKEN_OUT,
        }
    found = {}
    for name, value in item.items():
        is_variable = name == "value" and _is_secret(item.get("name"))
        if name in _COPIES or name == "managedFields":
            continue
        if is_variable or (_is_secret(name) and isinstance(value, str)):
            value = TAKEN_OUT
        found[name] = redacted(value)
    return found


def _is_secret(name: object) -> bool:
    """Whether a value of this name is none to show; names of files and of Secrets may be shown."""
    if not isinstance(name, str) or not _SECRET_NAME.search(name):
        return False
    return not re.search(r"(?i)(_file|path|name|ref|policy|review|review_audience)$", name)
