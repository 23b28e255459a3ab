"""Topics of a cluster of several groups: group 0 decides, the others follow, and group 0 knows how far they are.

A topic is created, changed and deleted by a record in group 0's log. The master of every other group asks group 0's
master for its catalogue, writes into its own log what differs there, and asks again: that it asks with the state that
it has taken over is how group 0 knows. Nobody has to remember what is still to be done: it is the difference between
two catalogues, found anew by whoever is master on either side.

Invariants, of a group that follows:

- what it was told is older than nothing that it has: a state below ``Catalogue.told`` is not taken over. So a late
  word of a master that was deposed in between never deletes a newer topic;
- it asks with a state only once all of that state is committed here;
- a topic has the id here that it has in group 0; a topic of the same name with another id takes its place.

Source: ``docs/decisions/0009-topics-of-several-groups.md``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

from firn.client.transport import Transport, path_of
from firn.errors import FirnError, InvariantBroken, Unavailable
from firn.tls import Credentials
from firn.topicspec import stored_spec
from firn_node.engine.api import FIRST_GROUP, TopicInfo
from firn_node.engine.catalogue import NEVER_TOLD, Told
from firn_node.engine.core import Core
from firn_node.engine.others import Others
from firn_node.engine.topicids import position_of, topic_id_at

_log = logging.getLogger(__name__)

POLL_S = 10.0  # group 0 answers after this at the latest, news or not
ASK_S = 30.0  # for one answer, other addresses and repetitions included
PAUSE_S = 0.1  # between looks at who is master here, and after a failure
RECENT_NAMES = 4096  # changes that are told one by one; who is further behind is told everything
ROWS = 256  # topics written by one batch
_TROUBLE = "following the topics of group 0"


class Followers:
    """Of group 0: what the other groups are told, and what they have."""

    def __init__(self, core: Core, epochs: Callable[[], tuple[int, int]]) -> None:
        """``epochs``: that of this master, and the newest that was elected by accepted data loss."""
        self._core = core
        self._epochs = epochs
        self._others = [group for group in core.groups if group != FIRST_GROUP]
        self._held: dict[int, Told] = {}
        # Changed names and where their newest record ends, the newest last; complete from that position on.
        self._recent: dict[str, int] = {}
        self._complete_from = core.dispatched_position
        self._changed = asyncio.Event()
        self._heard = asyncio.Event()
        core.catalogue.on_change = self._note

    def _note(self, name: str, end: int) -> None:
        self._recent.pop(name, None)
        self._recent[name] = end
        if len(self._recent) > RECENT_NAMES:
            self._complete_from = self._recent.pop(next(iter(self._recent)))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def tell(self, group: int, has: Told, wait_s: float) -> dict[str, Any]:
        """What a group lacks that has taken over the state ``has``; waits for news as long as there is none."""
        if group in self._others:
            self._held[group] = has
        heard, self._heard = self._heard, asyncio.Event()
        heard.set()
        is_known = has[0] == self._epochs()[0] and has[1] >= self._complete_from
        if is_known and not self._names_since(has[1]):
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        is_known = has[0] == self._epochs()[0] and has[1] >= self._complete_from
        by_name = self._core.catalogue.by_name
        names = self._names_since(has[1]) if is_known else [n for n in by_name if not n.startswith("__")]
        epoch, forced_epoch = self._epochs()
        position = self._core.dispatched_position
        return {
            "epoch": epoch,
            "position": position,
            "ids_end": topic_id_at(position, forced_epoch),
            "whole": not is_known,
            "topics": [_document(by_name[name]) for name in names if name in by_name],
            "deleted": [name for name in names if name not in by_name],
        }

    def _names_since(self, position: int) -> list[str]:
        found: list[str] = []
        for name, end in reversed(self._recent.items()):
            if end <= position:
                break
            found.append(name)
        return found[::-1]

    @property
    def changed_at(self) -> int:
        """Where the newest record of a topic ends, as far as this broker has seen it since its start."""
        return next(reversed(self._recent.values()), self._complete_from)

    def lacking(self, position: int) -> list[int]:
        """The groups that are not known to have what group 0's log holds before ``position``."""
        now = self._epochs()[0]
        held = {group: self._held.get(group, NEVER_TOLD) for group in self._others}
        return [group for group, (epoch, end) in held.items() if epoch != now or end < position]

    def lacking_topic(self, topic: TopicInfo) -> list[int]:
        """The groups that are not known to have a topic as it is now."""
        return self.lacking(self._recent.get(topic.name, position_of(topic.topic_id) + 1))

    async def wait(self, position: int, wait_s: float) -> list[int]:
        """The groups that still lack, after this time, what lies before ``position``; none as soon as none does."""
        try:
            async with asyncio.timeout(wait_s):
                while self.lacking(position):
                    await self._heard.wait()
        except TimeoutError:
            pass
        return self.lacking(position)


def _document(topic: TopicInfo) -> dict[str, Any]:
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "spec": topic.spec.document(),
        "groups": list(topic.groups),
    }


Write = Callable[[Mapping[str, TopicInfo | None], Told], Awaitable[None]]


class Following:
    """Of every other group: takes over the catalogue of group 0 as long as this broker is its group's master."""

    def __init__(
        self, core: Core, others: Others, write: Write, mastership: Callable[[], int | None],
        credentials: Credentials,
    ) -> None:  # fmt: skip
        """``write`` commits topics by name (None: deleted) with the state that they are of; ``mastership``: the epoch
        in which this broker takes writes, None when it does not.
        """
        self._core = core
        self._others = others
        self._write = write
        self._mastership = mastership
        self._credentials = credentials
        self._has = NEVER_TOLD
        self._epoch: int | None = None  # of the mastership in which ``_has`` was taken over
        self._whole_to = 0
        self._transport: Transport | None = None

    def whole_to(self) -> int | None:
        """``Catalogue.whole_to``: 0 before group 0 has told this master anything; None where it is none."""
        epoch = self._mastership()
        if epoch is None:
            return None
        return self._whole_to if epoch == self._epoch else 0

    async def run(self) -> None:
        """Follow, until cancelled."""
        try:
            while True:
                epoch = self._mastership()
                if epoch != self._epoch:
                    self._epoch, self._has, self._whole_to = epoch, NEVER_TOLD, 0
                if epoch is None:
                    await self._drop_transport()
                    self._core.health.troubles.pop(_TROUBLE, None)
                    await asyncio.sleep(PAUSE_S)
                    continue
                await self._step(epoch)
        finally:
            await self._drop_transport()

    async def _step(self, epoch: int) -> None:
        troubles = self._core.health.troubles
        try:
            answer = await self._ask()
            if self._mastership() == epoch:
                await self._take_over(answer)
            troubles.pop(_TROUBLE, None)
        except (FirnError, OSError) as error:
            if _TROUBLE not in troubles:
                _log.warning("%s failed, trying again: %s", _TROUBLE, error)
            troubles[_TROUBLE] = str(error)
            await self._drop_transport()  # it begins with the addresses that the record shows then
            await asyncio.sleep(PAUSE_S)
        except Exception:  # the task's boundary: topics of this group would stand still without a word
            _log.exception(_TROUBLE)
            self._core.metrics["following_failures"] += 1
            await asyncio.sleep(PAUSE_S)

    async def _ask(self) -> dict[str, Any]:
        if self._transport is None:
            await self._others.look()
            place = self._others.place_of(FIRST_GROUP)
            addresses = [*([place.master] if place.master else []), *place.brokers]
            if not addresses:
                raise Unavailable("group 0 has no record yet")
            self._transport = Transport(
                ",".join(addresses), timeout=ASK_S, credentials=self._credentials,
                randomness=Random(self._core.randomness.bytes(8)),
            )  # fmt: skip
        epoch, position = self._has
        query = {
            "group": self._core.group, "epoch": epoch, "position": position, "wait_ms": int(POLL_S * 1000),
        }  # fmt: skip
        document = (await self._transport.request("GET", path_of("catalogue"), query=query)).document()
        if not isinstance(document, dict):
            raise InvariantBroken(f"group 0 answered with {document!r} where a catalogue belongs")
        return document

    async def _take_over(self, answer: Mapping[str, Any]) -> None:
        """Commit what differs. 1. topics, the oldest first, in one or more batches; 2. this state counts as had."""
        told: Told = (int(answer["epoch"]), int(answer["position"]))
        catalogue = self._core.catalogue
        if told < catalogue.told:
            raise Unavailable(
                f"group 0 told of an older state {told} than {catalogue.told}, which is known here"
            )
        news: dict[str, TopicInfo | None] = {}
        for document in answer["topics"]:
            topic = _topic(document)
            if catalogue.by_name.get(topic.name) != topic:
                news[topic.name] = topic
        gone = answer["deleted"]
        if answer["whole"]:
            named = {document["name"] for document in answer["topics"]}
            gone = [name for name in catalogue.by_name if name not in named and not name.startswith("__")]
        news |= {name: None for name in gone if name in catalogue.by_name}
        self._check_ids(news)
        items = sorted(news.items(), key=lambda item: 0 if item[1] is None else item[1].topic_id)
        for at in range(0, len(items), ROWS):
            await self._write(dict(items[at : at + ROWS]), told)
        catalogue.told = max(catalogue.told, told)
        # An older group 0 says no ``ids_end``: its topics have their positions as ids.
        self._has, self._whole_to = told, int(answer.get("ids_end", told[1]))

    def _check_ids(self, news: Mapping[str, TopicInfo | None]) -> None:
        """An id is a topic's for good. *Errors*: Unavailable for one that another topic has here."""
        for name, topic in news.items():
            known = None if topic is None else self._core.catalogue.by_id.get(topic.topic_id)
            if known is not None and known.name != name:
                raise Unavailable(
                    f"topic {name!r} of group 0 has the id {known.topic_id}, which topic {known.name!r} has here: group 0 "
                    "has lost the end of its log; delete the topic there, and create it again"
                )

    async def _drop_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()


def _topic(document: Mapping[str, Any]) -> TopicInfo:
    return TopicInfo(
        str(document["name"]),
        int(document["topic_id"]),
        stored_spec(document["spec"]),
        tuple(document["groups"]),
    )
