"""The Python client: ``Client`` over asyncio; ``firn.client.blocking`` has the same names without await."""

from firn.client.core import Client
from firn.client.groups import GroupOffset
from firn.client.producer import Producer, ProducerSettings
from firn.client.reader import Reader
from firn.client.snapshot import Snapshot
from firn.client.table import Table
from firn.record import Record

__all__ = ["Client", "GroupOffset", "Producer", "ProducerSettings", "Reader", "Record", "Snapshot", "Table"]
