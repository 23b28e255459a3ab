"""GET of the stream: from the data of a message to the data of its answer, in columns all the way."""

from firn.errors import LimitExceeded
from firn.values import KEYS_MAX, pack_one, pack_values, unpack_keys
from firn.wire import Message
from firn_node.engine.api import Found
from firn_node.server.context import ServedBroker


def value_now(broker: ServedBroker, topic: str, message: Message) -> bytes | None:
    """The data of VALUES for one key; None for other numbers of keys, or when it has to be waited for.

    *Errors*: as ``found_values``.
    """
    data = message.data
    if message.meta.get("keys") != 1 or int.from_bytes(data[:4], "little") != len(data) - 4:
        return None
    try:
        found = broker.get_now(topic, bytes(data[4:]))
    except OSError:
        return None  # the task that asks again reports it
    return None if found is None else _packed(found[0])


def _packed(found: Found | None) -> bytes:
    if found is None:
        return pack_one(0, -1, 0, None, {})
    extras = {0: (found.tag, found.headers)} if found.tag is not None or found.headers else {}
    return pack_one(found.partition, found.offset, found.timestamp, found.value, extras)


async def found_values(broker: ServedBroker, topic: str, message: Message, floor: int | None) -> bytes:
    """The data of VALUES. *Errors*: Invalid, LimitExceeded, those of ``Broker.get``."""
    keys, starts = unpack_keys(message.data, message.meta.get("keys"))
    count = len(starts) - 1
    if count > KEYS_MAX:
        raise LimitExceeded(f"GET: {count} keys; at most {KEYS_MAX}")
    if count == 1:
        return _packed((await broker.get(topic, [keys.tobytes()], floor=floor))[0])
    a = await broker.get_many(topic, keys, starts, floor=floor)
    return pack_values(a.offsets, a.timestamps, a.lengths, a.partitions, a.values(), a.extras)
