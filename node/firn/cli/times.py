"""Points in time and places to start reading, as the command line takes them."""

import re
from datetime import UTC, datetime
from typing import Literal

from firn.errors import Invalid

_RFC3339 = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt ](\d{2}:\d{2}:\d{2})(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})", re.ASCII
)
_MILLISECONDS = re.compile(r"@(-?\d{1,18})", re.ASCII)


def parse_time(text: str, *, field: str = "time") -> int:
    """Milliseconds since 1970 of an RFC 3339 time or of ``@MILLISECONDS``. Fractions of a ms are cut off.

    Errors: Invalid, naming ``field`` and what was expected.
    """
    if match := _MILLISECONDS.fullmatch(text):
        return int(match[1])
    if match := _RFC3339.fullmatch(text):
        date, clock, fraction, zone = match.groups()
        try:
            whole = datetime.fromisoformat(f"{date}T{clock}{'+00:00' if zone in 'Zz' else zone}")
        except ValueError as error:
            raise Invalid(f"{field}: {text!r} is not a time: {error}") from error
        return int(whole.timestamp()) * 1000 + int(((fraction or ".0")[1:] + "000")[:3])
    raise Invalid(
        f"{field}: {text!r} is not a time; write RFC 3339 such as 2013-01-01T05:00:00Z, or @MILLISECONDS"
    )


def time_text(ms: int) -> str:
    """RFC 3339 in UTC; milliseconds only where there are any. ``@MS`` outside of the years 1 to 9999."""
    seconds, rest = divmod(ms, 1000)
    try:
        whole = datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"@{ms}"
    return f"{whole}.{rest:03d}Z" if rest else f"{whole}Z"


Start = tuple[Literal["earliest", "latest", "offset", "time"], int]


def parse_start(text: str) -> Start:
    """Where to begin: ``earliest``, ``latest``, an offset, or a time.

    Errors: Invalid.
    """
    if text == "earliest":
        return ("earliest", 0)
    if text == "latest":
        return ("latest", 0)
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return ("offset", int(text))
    try:
        return ("time", parse_time(text))
    except Invalid:
        raise Invalid(
            f"--from: {text!r} is neither earliest, latest, an offset, an RFC 3339 time nor @MILLISECONDS"
        ) from None
