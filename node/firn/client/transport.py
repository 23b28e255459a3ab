"""How a client reaches brokers: HTTP requests and the one shared stream, over the addresses it knows.

A request is tried at the preferred address; when nobody answers there, at the next. Answers that say ``retry``
are asked again after a jittered back-off, within the request's timeout. ``not_master`` names the address to go to.
What may have taken effect and must not twice (``is_repeatable=False``) is repeated only where it certainly did not.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar
from urllib.parse import quote, quote_from_bytes, urlencode

import aiohttp
from yarl import URL

from firn import __version__
from firn.client.addresses import Addresses
from firn.client.dialling import Dial, DialResolver, direct
from firn.client.pageget import CannotConnect, PageSockets
from firn.client.stream import Stream, address_in
from firn.errors import FirnError, InvariantBroken, NotMaster, Timeout, Unavailable, from_document
from firn.shown import ANY, parse_shown, shown_text
from firn.tls import ClientProof, Credentials, refusal_of

log = logging.getLogger(__name__)
T = TypeVar("T")

BACK_OFF_S = 0.05
BACK_OFF_MAX_S = 0.5  # what a failover may take longer because a client waits
CONNECT_TIMEOUT_S = 5.0
CONNECT_ONE_OF_MANY_S = 2.0  # another one may be the master by then
AT_MASTER_S = 10.0  # reads for any replica stay so long at the master, once one was not far enough
CREDENTIALS_POLL_S = 5.0  # how often files of credentials are looked at


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer. The body of a bulk read is a view of the memory that it was received into."""

    status: int
    headers: Mapping[str, str]
    body: bytes | memoryview

    def document(self) -> Any:
        """The JSON of the body. Errors: InvariantBroken when it is none."""
        try:
            return json.loads(bytes(self.body)) if self.body else None
        except ValueError as error:
            raise InvariantBroken(
                f"the broker's answer is not JSON: {error}: {bytes(self.body[:200])!r}"
            ) from error


def path_of(*parts: str | bytes | int) -> str:
    """A path of percent-encoded parts."""
    quoted = [quote_from_bytes(p, safe="") if isinstance(p, bytes) else quote(str(p), safe="") for p in parts]
    return "/".join(["/v1", *quoted])


class Transport:
    """Sessions and connections of one client. To be opened in the event loop that uses it."""

    def __init__(
        self, brokers: str | None, *, timeout: float, randomness: Random, credentials: Credentials,
        group: int | None = None, reads_any: bool = False, dial: Dial = direct,
    ) -> None:  # fmt: skip
        """``group``: the broker group that these are of, and nobody else is asked; None: whoever they name.
        ``reads_any``: for reads alone, that any replica may answer. ``dial``: where an address is reached.

        Errors: Invalid for an address that is none, or to which the token may not go.
        """
        self.addresses = Addresses(brokers)
        self.reads_any = reads_any
        self._shown: dict[int, int] = {}
        self._leaving: asyncio.TimerHandle | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        if reads_any:
            self.addresses.shuffle(randomness)
        for address in self.addresses.in_turn():
            credentials.check_address(address)
        self.timeout = timeout
        self.randomness = randomness
        self._group = group
        self._dial = dial
        self._credentials = credentials
        self._proof = ClientProof(credentials)
        self._watching: asyncio.Task[None] | None = None
        self._scheme = "https" if credentials.uses_tls else "http"
        self._session: aiohttp.ClientSession | None = None
        self._pages = PageSockets({}, connect_seconds=CONNECT_TIMEOUT_S, tls=self._proof.context, dial=dial)
        self._stream: Stream | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    def beside(self, brokers: Sequence[str], group: int) -> "Transport":
        """Another one, to the brokers of a group, with the same credentials."""
        return Transport(
            ",".join(brokers), timeout=self.timeout, randomness=self.randomness, credentials=self._credentials,
            group=group, dial=self._dial,
        )  # fmt: skip

    def of_any(self) -> "Transport":
        """Another one, to the same brokers, for reads that any replica may answer."""
        return Transport(
            ",".join(self.addresses.in_turn()), timeout=self.timeout, randomness=self.randomness,
            credentials=self._credentials, group=self._group, reads_any=True,
            dial=self._dial,
        )  # fmt: skip

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("this client is closed")

    @property
    def session(self) -> aiohttp.ClientSession:
        self._check_open()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(), auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )  # fmt: skip
        return self._session

    def _connector(self) -> aiohttp.TCPConnector:
        if self._dial is direct:
            return aiohttp.TCPConnector(limit=256)
        return aiohttp.TCPConnector(limit=256, resolver=DialResolver(self._dial), use_dns_cache=False)

    def back_off(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, jittered."""
        return min(BACK_OFF_MAX_S, BACK_OFF_S * 2.0 ** min(failures - 1, 16)) * self.randomness.uniform(
            0.5, 1.0
        )

    @property
    def open_stream(self) -> Stream | None:
        """The stream when it is open."""
        return self._stream if self._stream is not None and self._stream.is_open else None

    async def stream(self) -> Stream:
        """The open stream; a new one to the first address that answers when there is none.

        Errors: Unavailable when no address answers; one round of tries, without waiting between.
        """
        if self._stream is not None and self._stream.is_open:
            return self._stream
        async with self._connecting:
            self._check_open()
            if self._stream is not None:
                if self._stream.is_open:
                    return self._stream
                self.addresses.put_last(self._stream.address)
                self._drop_stream()
            self._watch_credentials()
            last: FirnError = Unavailable("no broker address")
            for address in self.addresses.in_turn():
                try:
                    self._stream = await Stream.connect(
                        address,
                        timeout=min(self.timeout, self._connect_s),
                        client=f"firn/{__version__}",
                        headers=self._proof.headers(),
                        tls=self._proof.context(),
                        hint=self._credentials.hint,
                        dial=self._dial,
                    )
                    self.addresses.prefer(address)
                    return self._stream
                except Unavailable as error:
                    last = error
                    self.addresses.set_aside(address)
            raise last

    def _watch_credentials(self) -> None:
        """Have connections made anew when what they have shown was replaced: it may not count for long.

        Errors: Invalid for files that never were any good.
        """
        if self._watching is None and self._proof.may_change:
            shown = self._proof.shown()
            self._watching = asyncio.create_task(self._renew_connections(shown), name="firn credentials")

    async def _renew_connections(self, shown: object) -> None:
        while True:
            await asyncio.sleep(CREDENTIALS_POLL_S)
            if (now := self._proof.shown()) == shown:
                continue
            shown = now
            self._pages.forget()
            self._drop_stream()  # what is open on it is asked again

    def reading(self) -> dict[str, str]:
        """What goes along with a read: nothing, unless any replica may answer."""
        return {"read_from": ANY, "shown": shown_text(self._shown)} if self.reads_any else {}

    def note_shown(self, shown: str | None) -> None:
        """What came with its answer. Errors: Invalid."""
        if self.reads_any and shown is not None:
            for group, position in parse_shown(shown).items():
                self._shown[group] = max(position, self._shown.get(group, 0))

    def is_elsewhere(self, error: FirnError) -> bool:
        """Whether what was asked of this transport's group is another group's: the asker's knowledge is out of date."""
        return self._group is not None and error.details.get("group", self._group) != self._group

    def follow(self, error: FirnError) -> None:
        """Learn from an error: go to the master that it names, or to another broker when it names none.

        Where any replica would do, reads stay at the master for a while only.
        """
        if self.is_elsewhere(error):
            return
        address = address_in(error)
        if isinstance(error, NotMaster) and address is None and len(self.addresses.in_turn()) > 1:
            if self.reads_any and self._stream is None:
                self.addresses.put_last(self.addresses.preferred)
            self._leave()
        elif address is not None and address != self.addresses.preferred:
            self._credentials.check_address(address)
            self.addresses.prefer(address)
            if self.reads_any and self._leaving is None:
                self._leaving = asyncio.get_running_loop().call_later(AT_MASTER_S, self._leave_master)
            self._drop_stream()

    def _drop_stream(self) -> None:
        """End the stream, if there is one; nobody waits for a broker that may be stopped to let go of it."""
        stale, self._stream = self._stream, None
        if stale is not None:
            stale.begin_close()
            dropping = asyncio.create_task(stale.close())
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    def _leave_master(self) -> None:
        """What a standby could not answer, it can by now."""
        self._leaving = None
        self.addresses.shuffle(self.randomness)
        self._drop_stream()

    def _leave(self) -> None:
        """Ask another broker from now on. Of many errors of one broker the first does it."""
        if self._stream is not None:
            self.addresses.put_last(self._stream.address)
            self._drop_stream()

    async def retried(
        self, attempt: Callable[[], Awaitable[T]], *, what: str, timeout: float | None = None
    ) -> T:
        """The result of ``attempt``, repeated while it fails with ``retry`` and time is left.

        Errors: the last one; Timeout when an attempt did not end in time: it says how the one before it failed.
        """
        seconds = self.timeout if timeout is None else timeout
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        failures, before = 0, ""
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await attempt()
            except TimeoutError:
                asked = before or f"; asked: {', '.join(self.addresses.in_turn())}"
                raise Timeout(f"{what}: no answer within {seconds:g} s{asked}") from None
            except FirnError as error:
                before = f"; the try before it: {error.message}"
                self.follow(error)
                failures = 1 if address_in(error) is not None else failures + 1
                pause = self.back_off(failures)
                if not error.retry or self.is_elsewhere(error) or loop.time() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: Any = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        is_repeatable: bool = True,
        address: str | None = None,
    ) -> Answer:
        """The answer to an HTTP request, if it is one of success.

        Shape: ``query`` parameters that are None are left out; ``body`` is sent as JSON, ``data`` as they are. With an
        ``address`` only that broker is asked.
        Errors: what the broker answered; Unavailable and Timeout when nobody did.
        """
        target = _target(path, query or {})
        sent, given = data, dict(headers or {})
        if body is not None:
            sent = json.dumps(body).encode()
        elif data is not None:
            given = {"Content-Type": "application/octet-stream", **given}

        async def ask(at: str) -> Answer:
            return await self._once(at, method, target, sent, given)

        async def attempt() -> Answer:
            if address is not None:
                return await self._at_one(address, ask)
            return await self._at_any_address(ask, f"{method} {target}", is_repeatable)

        return await self.retried(attempt, what=f"{method} {path}", timeout=timeout)

    async def ask_once(
        self, address: str, path: str, *, method: str = "GET", body: Any = None, seconds: float
    ) -> Answer:
        """One broker's answer to one request, which is not repeated.

        Errors: what the broker answered; Unavailable and Timeout when it did not; Invalid when the token may not go
        there.
        """
        self._credentials.check_address(address)
        data = None if body is None else json.dumps(body).encode()

        async def ask(at: str) -> Answer:
            return await self._once(at, method, path, data, {})

        try:
            async with asyncio.timeout(seconds):
                return await self._at_one(address, ask)
        except TimeoutError:
            raise Timeout(f"{address}: no answer within {seconds:g} s") from None

    async def bulk(
        self,
        path: str,
        *,
        query: Mapping[str, object],
        headers: Mapping[str, str],
        address: str | None = None,
    ) -> Answer:
        """The answer to a GET of many bytes: as ``request``, by connections that copy nothing (``firn.client.pageget``)."""
        target = _target(path, query)
        if self._is_closed:
            raise Unavailable("this client is closed")

        async def ask(at: str) -> Answer:
            self._watch_credentials()
            found = await self._pages.get(at, target, {**self._proof.headers(), **headers})
            return _checked(Answer(found.status, found.headers, found.body), f"GET {target}")

        async def attempt() -> Answer:
            if address is not None:
                return await self._at_one(address, ask)
            return await self._at_any_address(ask, f"GET {target}")

        return await self.retried(attempt, what=f"GET {path}")

    @property
    def _connect_s(self) -> float:
        """How long one of the brokers may take to greet; a stopped one is accepted for by its kernel."""
        return CONNECT_TIMEOUT_S if len(self.addresses.in_turn()) == 1 else CONNECT_ONE_OF_MANY_S

    async def _at_any_address(
        self, ask: Callable[[str], Awaitable[Answer]], what: str, is_repeatable: bool = True
    ) -> Answer:
        last: FirnError = Unavailable("no broker address")
        refused: FirnError | None = None  # which counts for more than that another one is away
        for address in self.addresses.in_turn():
            try:
                return await ask(address)
            except NotMaster as error:
                if address_in(error) is not None:
                    raise
                last = error
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, CannotConnect) as error:
                refused = _refusal_in(error, address) or refused
                last = Unavailable(f"{address}: cannot connect: {error}")
                self.addresses.set_aside(address)
                continue
            except (aiohttp.ClientError, OSError) as error:
                refusal = _refusal_in(error, address)
                refused = refusal or refused
                last = Unavailable(f"{address}: the connection broke: {error}{self._credentials.hint}")
                if refusal is None and not is_repeatable:
                    raise FirnError(
                        f"{what}: {last.message}; whether it took effect is unknown, so it was not repeated"
                    ) from error
            self.addresses.put_last(address)
        raise refused or last

    async def _at_one(self, address: str, ask: Callable[[str], Awaitable[Answer]]) -> Answer:
        try:
            return await ask(address)
        except (aiohttp.ClientError, OSError) as error:
            refusal = _refusal_in(error, address)
            is_away = isinstance(
                error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | CannotConnect
            )
            what = "cannot connect" if is_away else "cannot be asked"
            raise refusal or Unavailable(f"{address}: {what}: {error}{self._credentials.hint}") from error

    async def _once(
        self, address: str, method: str, target: str, data: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        extra = {"Content-Type": "application/json", **headers} if data is not None else dict(headers)
        url = URL(f"{self._scheme}://{address}{target}", encoded=True)
        self._watch_credentials()
        extra |= self._proof.headers()
        tls = self._proof.context() or True  # True: aiohttp's own, which http does not use
        async with self.session.request(method, url, data=data, headers=extra, ssl=tls) as response:
            answer = Answer(response.status, response.headers, await response.read())
        return _checked(answer, f"{method} {target}")

    async def close(self) -> None:
        self._is_closed = True
        if self._leaving is not None:
            self._leaving.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*self._dropping)
        self._pages.close()
        if self._stream is not None:
            await self._stream.close()
        if self._session is not None:
            await self._session.close()


def _refusal_in(error: Exception, address: str) -> FirnError | None:
    """``refusal_of`` of what aiohttp wraps."""
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
    return refusal_of(inner if isinstance(inner, BaseException) else error, address)


def _target(path: str, query: Mapping[str, object]) -> str:
    """``path`` with its query parameters; those that are None are left out."""
    chosen = {k: v if isinstance(v, bytes) else str(v) for k, v in query.items() if v is not None}
    return path + "?" + urlencode(chosen, quote_via=quote) if chosen else path


def _checked(answer: Answer, what: str) -> Answer:
    """``answer`` when it is one of success. Errors: the one that it holds."""
    if answer.status >= 400:
        raise error_of(answer, what)
    return answer


def error_of(answer: Answer, what: str) -> FirnError:
    """The error that an answer holds; one that is no document of ours is told as it is."""
    try:
        document = json.loads(bytes(answer.body))
    except ValueError:
        document = None
    if isinstance(document, dict) and "error" in document:
        return from_document(document)
    text = bytes(answer.body[:200]).decode("utf-8", "replace")
    kind = Unavailable if answer.status in (502, 503, 504) else FirnError
    return kind(f"{what}: HTTP {answer.status}: {text}")
