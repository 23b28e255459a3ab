"""``Client``: everything a program asks of brokers, over asyncio."""

import asyncio
import random
import re
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from firn.batch import Buffer
from firn.client import plans
from firn.client.clusterstatus import cluster_status
from firn.client.dialling import Dial, direct
from firn.client.feed import PAGE_BYTES, PREFETCH_BYTES, Source
from firn.client.gets import Gets
from firn.client.groupparts import joined_runs, whole_description, with_further_partitions
from firn.client.groups import GroupOffset, commit_offsets, fetch_offsets
from firn.client.operating import rebuild, switch_over
from firn.client.producer import Producer, ProducerSettings
from firn.client.puts import Put, Puts
from firn.client.reader import Reader, ReaderSettings, Start
from firn.client.routes import Routes, Target
from firn.client.snapshot import Snapshot
from firn.client.table import Table
from firn.client.transport import Transport, path_of
from firn.errors import Invalid, InvariantBroken, NotFound, Timeout, Unavailable, UnknownTopic
from firn.record import Record, parse_document
from firn.shown import ANY, MASTER
from firn.tls import find_credentials

TIMEOUT_S = 30.0
TOPICS_PAGE = 1000
POLL_S = 0.2
_HEX = re.compile("[0-9a-f]{1,8}")
T = TypeVar("T")
STATUS_SHARE = 3  # a broker that is frozen may take this part of the time: there may be more of them to ask


class Client:
    """A client of the brokers at ``HOST:PORT[,...]`` (else ``$FIRN_BROKER``, else ``127.0.0.1:7700``).

    Use it as ``async with``: leaving it closes its producers (which flushes them), readers and tables.
    ``timeout``: seconds for each request, retries included. ``tls_ca``, ``tls_cert``, ``tls_key`` (PEM files) and
    ``token`` (a bearer token, or ``token_file``) are for brokers that ask who is there; what is left out comes from
    the environment (``firn.tls``). ``read_from="any"``: records are read (``get``, ``get_many``, readers, tables) from
    any of these brokers, standbys too: what is read is committed, may be a moment old, and never goes back behind what
    was read before, whichever broker answered. A standby that is not so far leaves the answer to the master.
    ``dial``: for brokers that are not reached at the addresses that they have among themselves (``firn.client.dialling``).
    """

    def __init__(
        self,
        brokers: str | None = None,
        *,
        timeout: float = TIMEOUT_S,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        read_from: str = MASTER,
        dial: Dial = direct,
        randomness: random.Random | None = None,
    ) -> None:
        if read_from not in (MASTER, ANY):
            raise Invalid(f"read_from: expected {MASTER} or {ANY}, found {read_from!r}")
        credentials = find_credentials(
            tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token=token, token_file=token_file
        )
        self._transport = Transport(
            brokers,
            timeout=timeout,
            randomness=randomness or random.SystemRandom(),
            credentials=credentials,
            dial=dial,
        )
        self._read_from = read_from
        self._routes = Routes(self._transport)
        self._puts = Puts(self._transport.randomness)
        self._gets = Gets(
            self._routes.reading(self._transport, self._is_any(None)), self._gets_target, self._forget
        )
        self._targets: dict[str, Target] = {}
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._tables: list[Table] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(flush=error is None)

    async def close(self, *, flush: bool = True) -> None:
        """Close everything that was opened here. Errors: those of the producers' last flush."""
        try:
            ends = [p.close() if flush else p.abort() for p in list(self._producers)]
            outcomes = await asyncio.gather(*ends, return_exceptions=True)
            for reader in list(self._readers):
                await reader.close()
            for table in self._tables:
                await table.close()
        finally:
            await self._routes.close()
            await self._transport.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    # Topics

    async def create_topic(self, name: str, partitions: int = 1, **spec: Any) -> dict[str, Any]:
        """Create a topic; ``spec``: its other fields, as ``compaction={"minDirtyRatio": 0.2}``.

        Errors: TopicExists, Invalid naming the field.
        """
        body = {"name": name, "spec": {"partitions": partitions, **spec}}
        answer = await self._transport.request("POST", path_of("topics"), body=body, is_repeatable=False)
        self._targets.pop(name, None)
        return _mapping(answer.document())

    async def update_topic(self, name: str, **spec: Any) -> dict[str, Any]:
        """Change a topic's spec: the fields that are given become these, the others stay."""
        current = (await self.describe(name))["spec"]
        merged = {
            **current,
            **{k: {**current.get(k, {}), **v} if isinstance(v, Mapping) else v for k, v in spec.items()},
        }
        answer = await self._transport.request("PUT", path_of("topics", name), body={"spec": merged})
        return _mapping(answer.document())

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with its records. Errors: UnknownTopic."""
        await self._transport.request("DELETE", path_of("topics", name), is_repeatable=False)
        self._targets.pop(name, None)

    async def topics(self) -> list[dict[str, Any]]:
        """All topics, by name."""
        found: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            query = {"after": after, "limit": TOPICS_PAGE}
            document = (await self._transport.request("GET", path_of("topics"), query=query)).document()
            page = document["topics"] if isinstance(document, dict) else document
            found += page
            if len(page) < TOPICS_PAGE:
                return found
            after = page[-1]["name"]

    async def describe(self, name: str) -> dict[str, Any]:
        """A topic's id, spec and state, of all broker groups of the cluster. Errors: UnknownTopic."""
        path = path_of("topics", name)
        document = _mapping((await self._transport.request("GET", path)).document())
        if "cluster" not in document:
            return await with_further_partitions(name, self._transport, document)
        self._routes.learn(document)
        groups = [int(place["group"]) for place in document["cluster"]]
        return await whole_description(name, groups, self._routes.all())

    async def _target(self, name: str, timeout: float | None = None) -> Target:
        found = self._targets.get(name)
        if found is None:

            async def attempt() -> Target:
                answer = await self._transport.request("GET", path_of("topics", name), timeout=timeout)
                return self._routes.target(_mapping(answer.document()))

            found = await self._transport.retried(attempt, what=f"find topic {name}", timeout=timeout)
            self._targets[name] = found
        return found

    def _forget(self, name: str) -> None:
        self._targets.pop(name, None)

    async def _fresh_target(self, name: str, timeout: float | None = None) -> Target:
        self._forget(name)
        return await self._target(name, timeout)

    # Writing

    def producer(
        self,
        topic: str,
        *,
        linger_ms: float = 5,
        batch_bytes: int = 1 << 20,
        guard: AbstractContextManager[Any] | None = None,
        **settings: Any,
    ) -> Producer:
        """A producer; other ``settings`` are those of ``ProducerSettings`` (buffer_bytes, compression, ...)."""
        chosen = ProducerSettings(linger_ms=linger_ms, batch_bytes=batch_bytes, **settings)
        found = Producer(topic, self._transport, self._fresh_target, chosen, guard=guard)
        self._producers.add(found)
        return found

    async def put(
        self,
        topic: str,
        key: Buffer,
        value: Buffer | None,
        *,
        if_offset: int | None = None,
        tag: str | None = None,
        timestamp: int | None = None,
        headers: Mapping[str, str] | None = None,
        queues: Sequence[str] | None = None,
        partition: int | None = None,
    ) -> tuple[int, int]:
        """Write one record and wait for it: its partition and offset.

        ``if_offset``: only if the key's newest record has this offset; -1: only if there is none, or a tombstone.
        Errors: Conflict, with ``newest_offset`` in its details; Timeout when the outcome is unknown.
        """
        put = Put(
            key=key, value=value, if_offset=if_offset, tag=tag, timestamp=timestamp, headers=headers,
            queues=queues, partition=partition,
        )  # fmt: skip
        known = topic in self._targets
        try:
            return await self._puts.put(put, await self._target(topic), timeout=self._transport.timeout)
        except UnknownTopic:
            self._targets.pop(topic, None)
            if not known:
                raise
        # What was known of the topic may be of an earlier creation, in which nothing can have been written now.
        return await self._puts.put(put, await self._target(topic), timeout=self._transport.timeout)

    async def delete(
        self, topic: str, key: Buffer, *, if_offset: int | None = None, partition: int | None = None
    ) -> tuple[int, int]:
        """Write a tombstone: its partition and offset. Errors: as ``put``."""
        return await self.put(topic, key, None, if_offset=if_offset, partition=partition)

    # Reading

    def _is_any(self, read_from: str | None) -> bool:
        """Whether another than the master may answer: any replica, or one by its address."""
        return (read_from or self._read_from) != MASTER

    async def _gets_target(self, name: str, timeout: float | None) -> Target:
        return self._routes.for_reading(await self._target(name, timeout), is_any=self._is_any(None))

    async def get(self, topic: str, key: Buffer) -> Record | None:
        """The newest record of a key; None when there is none or it is deleted."""
        return await self._gets.one(topic, key if type(key) is bytes else _plain_keys([key])[0])

    async def get_many(self, topic: str, keys: Sequence[Buffer]) -> list[Record | None]:
        """The newest record of each key, in the order of ``keys``."""
        return await self._gets.many(topic, _plain_keys(keys))

    def reader(
        self,
        topic: str,
        *,
        view: str | None = None,
        start: Start | None = None,
        until_end: bool = False,
        partitions: Sequence[int] | None = None,
        group: str | None = None,
        queue: str | None = None,
        tag: str | None = None,
        ids: bool = False,
        read_from: str | None = None,
        snapshot: Snapshot | None = None,
        page_bytes: int = PAGE_BYTES,
        prefetch_bytes: int = PREFETCH_BYTES,
    ) -> Reader:
        """A reader of a topic's records; nothing is asked before it is iterated.

        ``view``: compacted (default; raw of a light queue) or raw. ``start``: earliest (default), latest,
        committed (default with a group), an offset, a time (datetime, RFC 3339 or ``@MILLISECONDS``), or a mapping
        of partition to offset. ``read_from``: ``master``, ``any`` replica (see the class), or the address of the one
        to read from; else as the client does. A reader of a snapshot reads it to its end, at the master. ``ids``:
        records of the raw view come with their message ids (``record.id``), which ``find`` resolves.
        """
        chosen = view or ("compacted" if queue is None else "raw")
        if chosen not in ("compacted", "raw"):
            raise Invalid(f"view: expected compacted or raw, found {view!r}")
        if chosen == "compacted" and queue is not None:
            raise Invalid("a light queue has no compacted view")
        if snapshot is not None and (snapshot.topic != topic or queue is not None or chosen == "raw"):
            raise Invalid(f"a snapshot of {snapshot.topic} is read as that topic's compacted view")
        source = Source(
            topic, chosen, until_end=until_end or snapshot is not None, queue=queue, tag=tag, ids=ids,
            snapshots=() if snapshot is None else snapshot.ids,
            read_from=None if read_from in (None, MASTER, ANY) else read_from,
            page_bytes=page_bytes, prefetch_bytes=prefetch_bytes,
        )  # fmt: skip
        begin = start if start is not None else ("earliest" if group is None else "committed")
        settings = ReaderSettings(
            source=source, start=begin, partitions=partitions, group=group,
            targets=None if snapshot is None else snapshot.ends,
        )  # fmt: skip
        is_any = snapshot is None and self._is_any(read_from)
        found = Reader(
            self._transport, settings, self._fresh_target, partial(self._routes.for_reading, is_any=is_any)
        )
        self._readers.add(found)
        return found

    async def table(self, topic: str) -> Table:
        """The topic as a live mapping. It fills from now on: ``await table.caught_up()``."""
        target = await self._fresh_target(topic)
        found = Table(topic, target, self._routes.for_reading(target, is_any=self._is_any(None)))
        self._tables.append(found)
        return found

    async def snapshot(self, topic: str) -> Snapshot:
        """A pinned state of a topic: ``async with await client.snapshot(topic) as snapshot``."""
        return await Snapshot.open(topic, await self._fresh_target(topic))

    async def query(
        self, topic: str, key: bytes, *, since: int | None = None, until: int | None = None
    ) -> list[Record]:
        """The raw records of a key with timestamps in ``[since, until)`` (ms), oldest first, as long as retained."""
        query = {"key": bytes(key), "since": since, "until": until}
        path = path_of("topics", topic, "query")
        answers = await self._of_each(topic, lambda way: way.request("GET", path, query=query))
        found: list[Record] = []
        for document in (answer.document() for answer in answers):
            found += map(record_of, document["records"] if isinstance(document, dict) else document)
        # Those of one group are in the order of its log; a key has its records in two only where somebody chose so.
        return found if len({r.partition for r in found}) < 2 else sorted(found, key=lambda r: r.timestamp)

    async def find(self, topic: str, id: str) -> Record | None:
        """The record that a message id names, as long as it is retained; None when there is none."""
        ways = (await self._target(topic)).transports
        number = id.partition("-")[0]
        group = int(number, 16) if len(ways) > 1 and _HEX.fullmatch(number) else 0
        way = self._routes.all().get(group, self._transport)
        try:
            answer = await way.request("GET", path_of("topics", topic, "ids", id))
        except NotFound:
            return None
        return record_of(answer.document())

    # Groups, compaction, status

    async def commit_offsets(
        self, group: str, topic: str, offsets: Mapping[int, GroupOffset | tuple[int, int | None] | int]
    ) -> None:
        """Keep a group's offsets: per partition (offset, since), or an offset alone."""
        await commit_offsets(self._transport, group, topic, offsets)

    async def fetch_offsets(self, group: str, topic: str) -> dict[int, GroupOffset]:
        """A group's offsets, of the partitions that have any."""
        return await fetch_offsets(self._transport, group, topic)

    async def compact(
        self, topic: str, *, force: bool = False, wait: bool = False, timeout: float | None = None
    ) -> dict[str, Any]:
        """Ask for a compaction: its document, with ``wait`` the final one.

        Errors: Timeout when it has not ended within ``timeout`` seconds (None: however long it takes).
        """
        path = path_of("topics", topic, "compaction")
        answers = await self._of_each(topic, lambda way: way.request("POST", path, body={"force": force}))
        document = joined_runs([_mapping(answer.document()) for answer in answers])
        if not wait:
            return document
        return await self._within(timeout, self._compacted(topic, document), topic)

    async def _compacted(self, topic: str, document: dict[str, Any]) -> dict[str, Any]:
        while document.get("state") in ("waiting", "running"):
            await asyncio.sleep(POLL_S)
            found = await self.compaction(topic)
            if found is None:
                raise Unavailable(
                    f"{topic}: the broker that compacted it has gone, and its compaction with it"
                )
            document = found
        return document

    async def _of_each(self, topic: str, ask: Callable[[Transport], Awaitable[T]]) -> list[T]:
        """The answers of the broker groups of a topic, in their order."""
        target = await self._target(topic)
        return await asyncio.gather(*(ask(transport) for transport in target.transports))

    async def _within(
        self, timeout: float | None, work: Awaitable[dict[str, Any]], topic: str
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout):
                return await work
        except TimeoutError:
            raise Timeout(f"{topic}: the compaction has not ended within {timeout:g} s; it goes on") from None

    async def compaction(self, topic: str) -> dict[str, Any] | None:
        """The newest requested compaction of a topic; None when there was none."""
        path = path_of("topics", topic, "compaction")
        try:
            answers = await self._of_each(topic, lambda way: way.request("GET", path))
        except NotFound:
            return None
        return joined_runs([_mapping(answer.document()) for answer in answers])

    async def cancel_compaction(self, topic: str) -> None:
        """Stop a requested compaction; what it has swapped stays."""
        path = path_of("topics", topic, "compaction")
        await self._of_each(topic, lambda way: way.request("DELETE", path))

    async def open_plan(
        self, topic: str, *, run: str = "", slice_records: int | None = None
    ) -> dict[str, Any]:
        """Begin a compaction by force that somebody else decides: ``firn.client.plans``."""
        target = await self._target(topic)
        return await plans.open_plan(target, topic, run=run, slice_records=slice_records)

    async def compaction_plan(self, topic: str) -> dict[str, Any] | None:
        """The newest plan of a topic; None when there is none."""
        return await plans.newest_plan(await self._target(topic), topic)

    async def touch_plan(
        self, topic: str, ids: Sequence[str], progress: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Say that the plan's driver is there, and so far. Errors: UnknownPlan: plan again."""
        return await plans.touch_plan(await self._target(topic), topic, ids, progress)

    async def cancel_plan(self, topic: str) -> None:
        """Let nothing more be compacted for a topic's open plan; what was by then stays. There may be none."""
        await plans.cancel_plan(await self._target(topic), topic)

    async def status(self) -> dict[str, Any]:
        """What one broker, the preferred one, says of itself and of its topics."""
        return _mapping((await self._transport.request("GET", path_of("status"))).document())

    async def cluster_status(self) -> dict[str, Any]:
        """The document of ``firn status -o json``: all brokers that are known here, and those that these know.

        Errors: that of the first address, when no broker answers. One alone that does not is a row of its own.
        """
        transport = self._transport
        seconds = transport.timeout / STATUS_SHARE

        async def ask(address: str) -> Any:
            return (await transport.ask_once(address, path_of("status"), seconds=seconds)).document()

        return await cluster_status(transport.addresses.in_turn(), ask)

    async def switchover(
        self, group: int, *, to: str | None = None, accept_data_loss: bool = False
    ) -> dict[str, Any]:
        """Hand a broker group over to the standby ``to``, else to the best one; done when the new master takes writes.

        ``accept_data_loss``: make the node ``to`` master though it may lack acknowledged records; only for a group
        whose master is gone for good, with everyone in sync. Errors: Unavailable says why it was not done.
        """
        return await switch_over(
            self._transport, self.cluster_status, group, to=to, accept_data_loss=accept_data_loss
        )

    async def rebuild(self, node: str, *, reason: str) -> dict[str, Any]:
        """Let a standby start anew from its master, as after a lost disk; ``reason`` goes into its log.

        Shape: its row of the status before. Errors: Invalid for a master: hand over first; Unavailable when nobody
        could give its records back.
        """
        return await rebuild(self._transport, self.cluster_status, node, reason=reason)


def _mapping(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise InvariantBroken(f"the broker answered with {document!r} where an object belongs")
    return document


def _plain_keys(keys: Sequence[Buffer]) -> list[bytes]:
    for at, key in enumerate(keys):
        if not isinstance(key, bytes | bytearray | memoryview):
            raise Invalid(f"key {at}: expected bytes, found {key!r}")
    return [key if type(key) is bytes else bytes(key) for key in keys]


def record_of(document: dict[str, Any]) -> Record:
    """The record that a consumed record's JSON object describes."""
    parsed = parse_document(document)
    return Record(
        str(document.get("topic")), int(document["partition"]), int(document["offset"]), int(document["timestamp"]),
        parsed.key, parsed.value, parsed.tag, parsed.headers or {}, parsed.queues, document.get("id"),
    )  # fmt: skip
