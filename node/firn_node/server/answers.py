"""Answers: a document as JSON or msgpack, an error in its one shape, a record as an object.

JSON unless ``Accept`` names ``application/msgpack``. Every error is ``{"error", "message", "retry", ...}`` with
the status of its class, whatever went wrong and wherever.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgpack
from aiohttp import web

from firn.errors import FirnError, Invalid, Unauthorized
from firn.wire import MSGPACK_TYPE

JSON_TYPE = "application/json"
_PRINTABLE = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) != "%")


class MethodNotAllowed(Invalid):
    status = 405


def to_json(document: Any) -> bytes:
    """UTF-8; a lone surrogate, which UTF-8 cannot hold, as the escape that JSON has for it."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def accepts(request: web.BaseRequest, media_type: str) -> bool:
    """Whether ``Accept`` names this type; wildcards name none."""
    accept = request.headers.get("Accept", "")
    return any(part.split(";", 1)[0].strip().lower() == media_type for part in accept.split(","))


def answer(
    request: web.BaseRequest, document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The document as JSON, or as msgpack to who asks for it."""
    if accepts(request, MSGPACK_TYPE):
        body, kind = msgpack.packb(document, unicode_errors="surrogatepass"), MSGPACK_TYPE
    else:
        body, kind = to_json(document) + b"\n", JSON_TYPE
    return web.Response(status=status, body=body, content_type=kind, headers=headers)


def error_answer(request: web.BaseRequest, error: FirnError) -> web.Response:
    headers = {"Retry-After": "1"} if error.retry and error.status == 503 else None
    if isinstance(error, Unauthorized):
        headers = {"WWW-Authenticate": "Bearer"}
    if isinstance(error, MethodNotAllowed):
        headers = {"Allow": ", ".join(error.details["allowed"])}
    return answer(request, error.document(), status=error.status, headers=headers)


def header_text(text: str) -> str:
    """Any text as a header value: printable ASCII as it is, the rest percent-encoded UTF-8."""
    return quote(text, safe=_PRINTABLE)
