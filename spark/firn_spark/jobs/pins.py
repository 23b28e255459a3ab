"""A topic's state, pinned for a job: opened, renewed and closed by the driver's process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from firn.errors import UnknownTopic
from firn_spark.connection import Connection
from firn_spark.fetch import Range


@dataclass(frozen=True, slots=True)
class Pin:
    """``ends``: of each partition the first offset that is not in it; ``rows``: about how many its compacted view has,
    where its broker has said so.
    """

    topic: str
    topic_id: int
    id: str
    ends: Mapping[int, int]
    rows: Mapping[int, int]

    def ranges(self) -> list[Range]:
        """All of it, a range a partition."""
        return [
            Range(topic=self.topic, topic_id=self.topic_id, partition=p, start=0, end=end, snapshot=self.id)
            for p, end in sorted(self.ends.items())
        ]


@contextmanager
def pinned(connection: Connection, topic: str) -> Iterator[Pin]:
    """The state of ``topic`` at the call, as long as the ``with`` lasts.

    Errors: UnknownTopic, also for a topic that is deleted and made anew meanwhile.
    """
    with connection.client() as client:
        described = client.describe(topic)
        topic_id = int(described["topic_id"])
        with client.snapshot(topic) as snapshot:
            if int(client.describe(topic)["topic_id"]) != topic_id:
                raise UnknownTopic(f"{topic} was deleted and made anew just now; run again")
            rows = {int(row["partition"]): int(row["live_records"]) for row in described["partitions"]}
            yield Pin(topic, topic_id, snapshot.id, dict(snapshot.ends), rows)
