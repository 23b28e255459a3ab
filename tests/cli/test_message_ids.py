"""Message ids on the command line: printed when asked for, looked up by ``query --id``."""

import json

from support.firn_cli.calls import Run


def test_a_printed_id_finds_its_record_and_an_unknown_one_finds_nothing(firn: Run, topic: str) -> None:
    firn("produce", topic, input=b"a\t1\nb\t2\na\t3\n")
    printed = firn("consume", topic, "--view", "raw", "--ids").stdout.splitlines()
    plain = firn("consume", topic, "--view", "raw").stdout.splitlines()
    assert len(printed) == 3
    for line, without in zip(printed, plain, strict=True):
        id = json.loads(line)["id"]
        assert firn("query", topic, "--id", id).stdout.splitlines() == [without]
        assert firn("query", topic, "--id", id, "--ids").stdout.splitlines() == [line]
    assert firn("query", topic, "--id", "0-7fffffff8-0-1000").stdout == b""
    assert b"message id" in firn("query", topic, "--id", "nonsense", code=1).stderr


def test_query_takes_a_key_or_an_id(firn: Run, topic: str) -> None:
    assert b"--key or --id" in firn("query", topic, code=2).stderr
    assert b"--key or --id" in firn("query", topic, "--key", "a", "--id", "b", code=2).stderr
