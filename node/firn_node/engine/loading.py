"""What a start reads: the topics off ``__topics``, and, of a broker of its own, the log beyond the checkpoint."""

import asyncio

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch
from firn.errors import Corrupt, MalformedBatch
from firn.types import TOPICS_TOPIC
from firn.wire import items
from firn_node.engine.api import ReadResult
from firn_node.engine.catalogue import Catalogue
from firn_node.engine.core import Core
from firn_node.engine.dispatcher import Dispatcher
from firn_node.engine.partitions import Partitions

_CATALOGUE_BYTES = 4 << 20


def load_catalogue(core: Core, partitions: Partitions) -> None:
    """Apply the records of ``__topics`` that are dispatched. *Errors*: Corrupt."""
    catalogue = core.catalogue
    partition = partitions.get(catalogue.named(TOPICS_TOPIC), 0)
    offset = 0
    while offset < partition.horizon:
        parts, offset = partition.log.read(offset, _CATALOGUE_BYTES)
        result = ReadResult(partition.topic.topic_id, parts, offset, offset, offset, 0)
        try:
            for item in items(result.take()):
                item.batch.verify()  # a wrong name or id would delete a topic's files
                _apply_topics(catalogue, item.batch, item.masked)
        except MalformedBatch as error:
            folder = partitions.folder(*partition.key)
            raise Corrupt(f"{folder}: the topics cannot be read: {error.message}", file=folder) from error
    for batch in partitions.raw_batches(*partition.key, partition.horizon, partition.dispatched_end):
        _apply_topics(catalogue, batch, None)
    catalogue.applied_end = partition.dispatched_end


def _apply_topics(catalogue: Catalogue, batch: Batch, masked: NDArray[np.bool_] | None) -> None:
    for row, (key, value) in enumerate(zip(batch.key_list(), batch.value_list(), strict=True)):
        if masked is None or not masked[row]:
            catalogue.apply(key.decode(), value)


async def replay(core: Core, dispatcher: Dispatcher) -> None:
    """Dispatch what the log holds beyond the checkpoint."""
    log = core.log
    for position, chunk in log.scan(core.dispatched_position, log.written_end):
        dispatcher.replay(position, chunk)
        core.metrics["replayed_bytes"] += len(chunk)
        await asyncio.sleep(0)
    core.dispatched_position = log.written_end
