"""What a request says, parsed once and checked by name: path, query, headers, body.

Keys in paths are percent-encoded *bytes*: they are taken from the raw request target, before anything decodes,
normalises or splits it. A query parameter that nobody asked for is refused by name, as is one given twice.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import msgpack
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from firn.errors import Invalid, LimitExceeded, Timeout
from firn.wire import MSGPACK_TYPE
from firn_node.server.budget import Charge

if TYPE_CHECKING:
    from firn_node.security.guard import Access

INT_MAX = (1 << 63) - 1
BODY_IDLE_SECONDS = 30.0  # a body of which so long nothing arrives is given up


def parse_int(text: str, name: str, *, least: int = 0, most: int = INT_MAX) -> int:
    """Errors: Invalid, naming the parameter and the range."""
    digits = text[1:] if text.startswith("-") else text
    if len(text) <= 20 and digits.isascii() and digits.isdigit() and least <= int(text) <= most:
        return int(text)
    raise Invalid(
        f"{name}: expected a whole number from {least} to {most}, found {text[:64]!r}", parameter=name
    )


def to_text(raw: bytes, name: str) -> str:
    """Errors: Invalid when the bytes are not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Invalid(f"{name}: {raw[:64]!r} is not UTF-8", parameter=name) from None


class Query:
    """The parameters after the ``?``. Ask for each that is known, then call ``finish``."""

    def __init__(self, text: bytes) -> None:
        self._given: dict[str, bytes] = {}
        self._known: list[str] = []
        for part in text.split(b"&") if text else ():
            raw_name, _, raw = part.partition(b"=")
            name = to_text(unquote_to_bytes(raw_name.replace(b"+", b" ")), "parameter name")
            if name in self._given:
                raise Invalid(f"{name[:64]}: given twice", parameter=name[:64])
            self._given[name] = unquote_to_bytes(raw.replace(b"+", b" "))

    def raw(self, name: str) -> bytes | None:
        self._known.append(name)
        return self._given.get(name)

    def text(self, name: str) -> str | None:
        raw = self.raw(name)
        return None if raw is None else to_text(raw, name)

    def integer(self, name: str, *, least: int = 0, most: int = INT_MAX) -> int | None:
        """None when absent or empty (``since=`` is how the interface writes "no value")."""
        text = self.text(name)
        return parse_int(text, name, least=least, most=most) if text else None

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        """One of ``options``; the first when absent."""
        text = self.text(name)
        if not text:
            return options[0]
        if text not in options:
            raise Invalid(f"{name}: expected {' or '.join(options)}, found {text[:64]!r}", parameter=name)
        return text

    def finish(self) -> None:
        """Errors: Invalid for a parameter that was not asked for."""
        unknown = [name for name in self._given if name not in self._known]
        if unknown:
            known = ", ".join(self._known) or "none"
            raise Invalid(
                f"{unknown[0][:64]}: unknown parameter; known here: {known}", parameter=unknown[0][:64]
            )


@dataclass(slots=True)
class Call:
    """One request: aiohttp's, with the variable parts of its path as bytes.

    ``access``: what its sender may do; None on a broker without authentication, where everybody may everything.
    """

    http: web.BaseRequest
    path: dict[str, bytes]
    query: Query
    access: "Access | None" = None
    target: str | None = None  # what it is about, where the path does not say

    def topic(self) -> str | None:
        """The topic that the path names; bytes that no name has are kept apart by their escapes."""
        raw = self.path.get("topic")
        return None if raw is None else raw.decode("utf-8", "backslashreplace")

    def name(self, part: str) -> str:
        return to_text(self.path[part], part)

    def integer(self, part: str, *, most: int = (1 << 32) - 1) -> int:
        return parse_int(to_text(self.path[part], part), part, most=most)

    def header(self, name: str) -> str | None:
        """A header's percent-decoded text. *Errors*: Invalid when it is not UTF-8."""
        found = self.http.headers.get(name)
        return (
            None
            if found is None
            else to_text(unquote_to_bytes(found.encode("utf-8", "surrogateescape")), name)
        )

    def header_integer(self, name: str, *, least: int = 0, most: int = INT_MAX) -> int | None:
        found = self.http.headers.get(name)
        return None if found is None else parse_int(found.strip(), name, least=least, most=most)


async def next_chunk(http: web.BaseRequest) -> bytes:
    """The next bytes of the body, empty at its end.

    Errors: Timeout when nothing came for long, Invalid when the transfer encoding is broken.
    """
    try:
        async with asyncio.timeout(BODY_IDLE_SECONDS):
            return await http.content.readany()
    except TimeoutError:
        raise Timeout(f"body: nothing arrived for {BODY_IDLE_SECONDS:g} s; send the request again") from None
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise Invalid(f"body: broken transfer encoding: {error}") from None


def welcome_body(http: web.BaseRequest) -> None:
    """Answer ``Expect: 100-continue``, so that the peer sends the body that is now wanted.

    Errors: Invalid for a compressed body: nothing here would decompress it.
    """
    encoding = http.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding.lower() != "identity":
        raise Invalid(f"Content-Encoding: {encoding[:64]!r} is not taken; send the body as it is")
    if http.headers.get(hdrs.EXPECT, "").lower() == "100-continue" and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def read_body(call: Call, charge: Charge, limit: int) -> bytes:
    """The whole body; its bytes are on ``charge``.

    Errors: LimitExceeded past ``limit`` bytes, before they are read where the length is announced.
    """
    announced = call.http.content_length
    if announced is not None and announced > limit:
        raise LimitExceeded(f"body: {announced} bytes; at most {limit} here")
    if not call.http.body_exists:
        return b""
    if announced:
        await charge.add(announced)
    welcome_body(call.http)
    chunks, size = [], 0
    while chunk := await next_chunk(call.http):
        size += len(chunk)
        if size > limit:
            raise LimitExceeded(f"body: more than {limit} bytes")
        if announced is None:
            await charge.add(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


async def read_document(call: Call, charge: Charge, limit: int) -> Any:
    """The body as JSON (or msgpack by ``Content-Type``); None when there is none.

    Errors: Invalid when it is malformed.
    """
    body = await read_body(call, charge, limit)
    if not body:
        return None
    try:
        if call.http.content_type == MSGPACK_TYPE:
            return msgpack.unpackb(body)
        return json.loads(body)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise Invalid(f"body: malformed: {error}") from error


def mapping(document: Any, what: str, known: tuple[str, ...]) -> dict[str, Any]:
    """``document`` as an object with no other fields than ``known``; absent is empty.

    Errors: Invalid, naming the field.
    """
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise Invalid(f"{what}: expected an object, found {type(document).__name__}")
    unknown = [name for name in document if name not in known]
    if unknown:
        raise Invalid(f"{what}: {str(unknown[0])[:64]!r}: unknown field; known ones are {', '.join(known)}")
    return document
