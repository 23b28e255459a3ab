"""Produces of one stream on their way to the engine.

What arrives within one turn of the event loop goes to the engine as one call: batches lie one after another
anyway, so a thousand small messages cost one call, one group, one ``fdatasync``. A message that is not a whole
number of batches by its headers goes alone, so that its fault is its own.
"""

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from firn.batch import HEADER_BYTES, MAGIC, VERSION, Buffer, header_crc
from firn.errors import FirnError, Invalid, Unavailable
from firn_node.engine.api import Appended, Outcome
from firn_node.server.context import Context
from firn_node.server.masters import masterless, refuse_named

log = logging.getLogger("firn.server")

_JOINED_BYTES_MAX = 1 << 20  # messages are joined up to here: joining copies
_HEAD = struct.Struct("<IH2xII")  # magic, version, header CRC, size

Answer = Callable[[int, "list[Any] | FirnError"], None]


@dataclass(slots=True)
class Produced:
    """A PRODUCE message; ``held`` is what it has of the in-flight budget."""

    id: int
    data: Buffer
    conditions: list[int | None] | None
    held: int
    batches: int | None = None
    fault: FirnError | None = None  # why the engine is not asked at all


def parse_conditions(meta: dict[str, Any]) -> list[int | None] | None:
    """``if_offset`` of a PRODUCE. *Errors*: Invalid."""
    found = meta.get("if_offset")
    if found is None:
        return None
    if isinstance(found, list) and all(
        c is None or (isinstance(c, int) and not isinstance(c, bool) and -1 <= c < 1 << 63) for c in found
    ):
        return found
    raise Invalid("PRODUCE: if_offset: expected a list of offsets (-1: must not exist) or null, one a batch")


def trusted_size(data: Buffer, at: int) -> int | None:
    """The size of the batch at ``at`` when its header vouches for it, whether or not all of it is there; else None.

    The engine finds the batches of one call by the same rule: one that it cannot trust ends that call.
    """
    if len(data) - at < HEADER_BYTES:
        return None
    magic, version, crc, size = _HEAD.unpack_from(data, at)
    if magic != MAGIC or version != VERSION or size < HEADER_BYTES or size % 8:
        return None
    return size if header_crc(memoryview(data)[at : at + HEADER_BYTES]) == crc else None


def count_batches(data: Buffer) -> int | None:
    """How many whole batches the bytes are by their headers; None when they are not."""
    at, count, end = 0, 0, len(data)
    while at < end:
        size = trusted_size(data, at)
        if size is None or at + size > end:
            return None
        at += size
        count += 1
    return count or None


def result_item(outcome: Outcome) -> Any:
    """One batch's result as ACK carries it."""
    if isinstance(outcome, Appended):
        return [outcome.partition, outcome.base_offset]
    return outcome.document()


class Producing:
    """Hands over what arrived, and answers each message once its batches have outcomes."""

    def __init__(self, context: Context, answer: Answer) -> None:
        self._context = context
        self._answer = answer
        self._arrived: list[Produced] = []
        self._is_due = False
        self._running: set[asyncio.Task[None]] = set()
        # The task that answers an exchange's newest message: its next one is answered after it.
        self._last: dict[int, asyncio.Task[None]] = {}

    def add(self, message: Produced) -> None:
        self._arrived.append(message)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._hand_over)

    async def settled(self) -> None:
        """Wait until everything that has arrived is answered."""
        while self._is_due or self._running:
            await asyncio.sleep(0)
            if self._running:
                await asyncio.wait(self._running)

    def _hand_over(self) -> None:
        self._is_due = False
        arrived, self._arrived = self._arrived, []
        group: list[Produced] = []
        size = 0
        for message in arrived:
            _inspect(message)
            alone = message.batches is None or len(message.data) >= _JOINED_BYTES_MAX
            if group and (alone or size + len(message.data) > _JOINED_BYTES_MAX):
                self._start(group)
                group, size = [], 0
            if alone:
                self._start([message])
                continue
            group.append(message)
            size += len(message.data)
        if group:
            self._start(group)

    def _start(self, group: list[Produced]) -> None:
        """Append what a group holds, now, and answer: now too, when there is nothing to wait for."""
        # Exchanges with an unanswered message: their next answer leaves after it, those of others at once.
        before = {m.id: self._last[m.id] for m in group if m.id in self._last} if self._last else {}
        found, durable = self._append(group)
        if durable is None and not before:
            self._answer_all(self._answers(group, found))
            return
        task = asyncio.create_task(self._run(group, found, durable, before))
        for message in group:
            self._last[message.id] = task
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(
        self,
        group: list[Produced],
        found: Sequence[Outcome] | FirnError,
        durable: Awaitable[None] | None,
        before: "dict[int, asyncio.Task[None]]",
    ) -> None:
        if durable is not None:
            try:
                await durable
            except Exception as error:
                found = self._failure(error)
        answers = self._answers(group, found)
        if before:
            self._answer_all((m, a) for m, a in answers if m.id not in before)
            await asyncio.wait(set(before.values()))
            answers = [(m, a) for m, a in answers if m.id in before]
        self._answer_all(answers)

    def _answer_all(self, answers: Iterable[tuple[Produced, "list[Any] | FirnError"]]) -> None:
        current = (
            asyncio.current_task()
        )  # None where nothing was waited for: then nobody waits for this either
        for message, found in answers:
            if current is not None and self._last.get(message.id) is current:
                del self._last[message.id]
            self._answer(message.id, found)

    def _answers(
        self, group: list[Produced], found: Sequence[Outcome] | FirnError
    ) -> list[tuple[Produced, "list[Any] | FirnError"]]:
        """What to answer to each message; what they held of the budget goes back."""
        held = sum(message.held for message in group)
        if held:
            self._context.in_flight.give(held)
        if isinstance(found, FirnError):
            return [(message, found) for message in group]
        counted = sum(message.batches or 0 for message in group)
        if len(group) > 1 and len(found) != counted:
            mixed_up = Unavailable(f"{len(found)} outcomes for {counted} batches; send them again")
            return [(message, mixed_up) for message in group]
        answers: list[tuple[Produced, list[Any] | FirnError]] = []
        at = 0
        for message in group:
            count = len(found) if message.batches is None else message.batches
            answers.append((message, [result_item(outcome) for outcome in found[at : at + count]]))
            at += count
        return answers

    def _append(
        self, group: list[Produced]
    ) -> "tuple[Sequence[Outcome] | FirnError, Awaitable[None] | None]":
        """Outcomes, or why there are none; and what must be awaited before they are told. Never raises."""
        first = group[0]
        if first.fault is not None:
            return first.fault, None
        found: Sequence[Outcome] | FirnError
        durable: Awaitable[None] | None = None
        try:
            found, durable = self._begin(group)
        except Exception as error:
            found = self._failure(error)
        if durable is None and (refusal := masterless(found)) is not None:
            durable = refuse_named(self._context, refusal)
        return found, durable

    def _begin(self, group: list[Produced]) -> "tuple[Sequence[Outcome], Awaitable[None] | None]":
        """Errors: of every kind: nothing was appended."""
        begin, first = self._context.broker.begin_produce, group[0]
        if len(group) == 1:
            return begin(first.data, conditions=first.conditions)
        conditions: list[int | None] | None = None
        if any(message.conditions is not None for message in group):
            conditions = []
            for message in group:
                conditions += message.conditions or [None] * (message.batches or 0)
        return begin(bytearray().join(message.data for message in group), conditions=conditions)

    def _failure(self, error: Exception) -> FirnError:
        """What to answer in the place of outcomes. One without a class of ours is logged and counted."""
        if isinstance(error, FirnError):
            return error
        log.error("produce failed", exc_info=error)
        self._context.counts.failures += 1
        return FirnError("an unforeseen error; the broker's log has it. Records may be written or not")


def _inspect(message: Produced) -> None:
    """Count the batches; a message that cannot go with others is left without a count."""
    count, conditions = count_batches(message.data), message.conditions
    if conditions is not None and count is not None and len(conditions) != count:
        message.fault = Invalid(f"PRODUCE: if_offset has {len(conditions)} items for {count} batches")
    elif not len(message.data):
        message.fault = Invalid("PRODUCE: no batch")
    else:
        message.batches = count
