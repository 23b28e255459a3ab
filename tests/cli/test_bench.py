"""``firn bench`` measures a real broker and prints one JSON object; no figure is judged."""

import json

from firn.bench.data import Data
from support.firn_cli.calls import Run


def test_each_measurement_prints_one_object(firn: Run) -> None:
    made = json.loads(firn("bench", "produce", "--records", "3000", "--keys", "50", "-o", "json").stdout)
    assert (made["what"], made["records"]) == ("produce", 3000)
    read = json.loads(firn("bench", "consume", "--view", "raw", "-o", "json").stdout)
    assert read["records"] == 3000
    got = json.loads(firn("bench", "get", "--records", "60", "--keys", "60", "-o", "json").stdout)
    assert got["hits"] == 50
    assert got["p50_ms"] <= got["p99_ms"] <= got["max_ms"]
    compacted = json.loads(firn("bench", "compact", "-o", "json").stdout)
    assert (compacted["state"], compacted["records_after"]) == ("done", 50)
    assert b"records_per_second" in firn("bench", "consume").stdout


def test_an_unknown_measurement_is_wrong_usage(firn: Run) -> None:
    firn("bench", "fly", code=2)


def test_records_that_begin_at_a_later_number_have_the_keys_of_those_numbers() -> None:
    every = Data(100, 100, 8).key_list(0, 100)
    assert Data(10, 100, 8, first=30).key_list(0, 10) == every[30:40]
    assert Data(10, 100, 8, first=95).key_list(0, 10) == every[95:] + every[:5]
