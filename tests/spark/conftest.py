"""One broker process for all tests of this folder, and one Spark session, on the master that users get who name none."""

import itertools
import sys
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess
from firn_spark.connection import Connection
from firn_spark.session import keeper, session

_numbers = itertools.count()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("spark-broker"))
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def connection(broker: BrokerProcess) -> Connection:
    return Connection(bootstrap=broker.address)


@pytest.fixture(scope="session")
def client(connection: Connection) -> Iterator[Client]:
    with connection.client() as found:
        yield found


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, broker: BrokerProcess) -> Iterator[SparkSession]:
    """It ends before the broker does, to which it gives its snapshots back."""
    found = session(
        "firn-tests",
        conf={
            "spark.ui.enabled": "false",
            "spark.default.parallelism": "2",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            "spark.pyspark.python": sys.executable,
        },
    )
    held = keeper(found)
    assert held is not None
    yield found
    held.close()
    found.stop()


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"t{next(_numbers)}"
