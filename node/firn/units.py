"""Durations (``500ms 0s 5m 24h 7d``) and sizes (``64Ki 16Mi 1Gi``): one number and one unit."""

import re

from firn.errors import Invalid

_DURATION = re.compile(r"([0-9]+)(ms|s|m|h|d)")
_DURATION_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti)?")
_SIZE_BYTES = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_INTEGER_MAX = (1 << 63) - 1


def duration_ms(text: object, *, field: str = "duration") -> int:
    """Milliseconds of a duration such as ``24h``.

    Errors: Invalid, naming ``field`` and what was expected.
    """
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    value = int(match[1]) * _DURATION_MS[match[2]] if match else -1
    if not 0 <= value <= _INTEGER_MAX:
        raise Invalid(
            f"{field}: {text!r} is not a duration; write one number and a unit, such as 500ms, 30s, 5m, 24h or 7d"
        )
    return value


def size_bytes(text: object, *, field: str = "size") -> int:
    """Bytes of a size such as ``64Mi``; a bare integer counts bytes.

    Errors: Invalid, naming ``field`` and what was expected.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    value = int(match[1]) * _SIZE_BYTES[match[2]] if match else -1
    if not 0 <= value <= _INTEGER_MAX:
        raise Invalid(
            f"{field}: {text!r} is not a size; write one number and a unit, such as 64Ki, 16Mi or 1Gi"
        )
    return value


def duration_text(ms: int) -> str:
    """The shortest exact text of a duration, as ``duration_ms`` reads it."""
    for unit in ("d", "h", "m", "s"):
        if ms and ms % _DURATION_MS[unit] == 0:
            return f"{ms // _DURATION_MS[unit]}{unit}"
    return f"{ms}ms" if ms else "0s"


def size_text(value: int) -> str:
    """The shortest exact text of a size, as ``size_bytes`` reads it."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if value and value % _SIZE_BYTES[unit] == 0:
            return f"{value // _SIZE_BYTES[unit]}{unit}"
    return str(value)
