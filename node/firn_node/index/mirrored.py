"""Both indexes at once: every write goes to both, reads are RocksDB's. For a migration without downtime.

Invariant: the checkpoint is the lower one of the two, so a replay after a crash between the two flushes reaches
both, and each skips what it knows.
"""

from collections.abc import Iterator, Sequence

from firn_node.index.base import Entry, LightEntry, LightRow, NewEntry, NewLight, PartitionEnd, ProducerRow
from firn_node.index.files import FilesIndex
from firn_node.index.rocks import RocksIndex


class MirroredIndex:
    kind = "mirrored"
    has_light_queues = False

    def __init__(self, rocks: RocksIndex, files: FilesIndex) -> None:
        self.rocks = rocks
        self.files = files
        log_start = max(rocks.log_start, files.log_start)
        if rocks.log_start != files.log_start:
            self.trim(log_start)

    @property
    def checkpoint(self) -> int:
        return min(self.rocks.checkpoint, self.files.checkpoint)

    @property
    def log_start(self) -> int:
        return self.rocks.log_start

    def append(self, entries: Sequence[NewEntry], lights: Sequence[NewLight] = ()) -> None:
        self.files.append(entries, lights)  # first: it refuses light queues and too many partitions
        self.rocks.append(entries)

    def flush(self, checkpoint: int) -> None:
        self.files.flush(checkpoint)
        self.rocks.flush(checkpoint)

    def trim(self, log_start: int) -> None:
        self.files.trim(log_start)
        self.rocks.trim(log_start)

    def sweep(self, log_start: int, limit: int) -> int:
        return self.files.sweep(log_start, limit) + self.rocks.sweep(log_start, limit)

    def delete_topic(self, topic_id: int) -> None:
        self.files.delete_topic(topic_id)
        self.rocks.delete_topic(topic_id)

    def put_state(self, topic_id: int, partition: int, state: bytes) -> None:
        self.files.put_state(topic_id, partition, state)
        self.rocks.put_state(topic_id, partition, state)

    def put_producer(self, topic_id: int, partition: int, producer_id: int, row: bytes) -> None:
        self.files.put_producer(topic_id, partition, producer_id, row)
        self.rocks.put_producer(topic_id, partition, producer_id, row)

    def delete_producers(self, older_than_ms: int) -> None:
        self.files.delete_producers(older_than_ms)
        self.rocks.delete_producers(older_than_ms)

    def restore_end(self, end: PartitionEnd) -> None:
        self.files.restore_end(end)
        self.rocks.restore_end(end)

    def restore_queue(self, topic_id: int, partition: int, name: str, count: int, timestamp: int) -> None:
        self.files.restore_queue(topic_id, partition, name, count, timestamp)  # refuses

    def find(self, topic_id: int, partition: int, offset: int) -> Entry | None:
        return self.rocks.find(topic_id, partition, offset)

    def scan(
        self, topic_id: int, partition: int, offset: int, *, end: int | None = None, limit: int = 1024
    ) -> list[Entry]:
        return self.rocks.scan(topic_id, partition, offset, end=end, limit=limit)

    def find_time(self, topic_id: int, partition: int, timestamp: int) -> Entry | None:
        return self.rocks.find_time(topic_id, partition, timestamp)

    def bounds(self, topic_id: int, partition: int, log_start: int) -> tuple[int, int] | None:
        return self.rocks.bounds(topic_id, partition, log_start)

    def state(self, topic_id: int, partition: int) -> bytes | None:
        return self.rocks.state(topic_id, partition)

    def states(self) -> Iterator[tuple[int, int, bytes]]:
        return self.rocks.states()

    def producer(self, topic_id: int, partition: int, producer_id: int) -> bytes | None:
        return self.rocks.producer(topic_id, partition, producer_id)

    def light_scan(
        self, topic_id: int, partition: int, name: str, queue_offset: int, *, limit: int
    ) -> list[LightEntry]:
        return self.files.light_scan(topic_id, partition, name, queue_offset, limit=limit)  # refuses

    def light_bounds(self, topic_id: int, partition: int, name: str) -> tuple[int, int] | None:
        return self.files.light_bounds(topic_id, partition, name)  # refuses

    def partitions(self) -> Iterator[PartitionEnd]:
        return self.rocks.partitions()

    def producers(self) -> Iterator[ProducerRow]:
        return self.rocks.producers()

    def lights(self) -> Iterator[LightRow]:
        return self.rocks.lights()

    def close(self) -> None:
        self.rocks.close()
        self.files.close()
