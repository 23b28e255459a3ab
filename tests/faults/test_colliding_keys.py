"""Two keys with one hash elsewhere are two keys here: nothing is decided by a hash that a client can know."""

import hashlib

from engine_kit import run, running

from firn.batch import Codecs

# The pair that X. Wang and H. Yu published in 2004 (EUROCRYPT 2005, "How to Break MD5 and Other Hash Functions").
FIRST = bytes.fromhex(
    "d131dd02c5e6eec4693d9a0698aff95c2fcab58712467eab4004583eb8fb7f89"
    "55ad340609f4b30283e488832571415a085125e8f7cdc99fd91dbdf280373c5b"
    "d8823e3156348f5bae6dacd436c919c6dd53e2b487da03fd02396306d248cda0"
    "e99f33420f577ee8ce54b67080a80d1ec69821bcb6a8839396f9652b6ff72a70"
)
SECOND = bytes.fromhex(
    "d131dd02c5e6eec4693d9a0698aff95c2fcab50712467eab4004583eb8fb7f89"
    "55ad340609f4b30283e4888325f1415a085125e8f7cdc99fd91dbd7280373c5b"
    "d8823e3156348f5bae6dacd436c919c6dd53e23487da03fd02396306d248cda0"
    "e99f33420f577ee8ce54b67080280d1ec69821bcb6a8839396f965ab6ff72a70"
)


def java_hash(text: str) -> int:
    """``String.hashCode``, by which RocketMQ's key index finds ``topic#key``."""
    found = 0
    for letter in text:
        found = (31 * found + ord(letter)) & 0xFFFFFFFF
    return found


def test_both_keys_of_a_published_md5_collision_survive_every_compaction(tmp_path):
    assert FIRST != SECOND
    assert len(FIRST) == len(SECOND) == 128
    assert hashlib.md5(FIRST).digest() == hashlib.md5(SECOND).digest()

    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"deleteRetention": "0s", "memory": "64Ki"})
            await kit.put("t", [(FIRST, b"old"), (SECOND, b"second")])
            await kit.put("t", [(FIRST, b"first")], codecs=Codecs(1, 1, 1))
            assert await kit.map("t") == {FIRST: b"first", SECOND: b"second"}
            result = (await kit.compact("t")).partitions[0]
            assert (result.state, result.records_after) == ("done", 2)
            assert await kit.map("t") == {FIRST: b"first", SECOND: b"second"}
            assert await kit.get("t", FIRST) == b"first"
            assert await kit.get("t", SECOND) == b"second"
            await kit.put("t", [(FIRST, None)])
            assert (await kit.compact("t")).partitions[0].records_after == 1
            assert await kit.get("t", FIRST) is None
            assert await kit.map("t") == {SECOND: b"second"}
            found = await kit.broker.query("t", FIRST)
            assert [(r.offset, r.value) for r in found] == [(0, b"old"), (2, b"first"), (3, None)]

    run(go())


def test_keys_and_topics_with_one_java_hash_are_never_taken_for_each_other(tmp_path):
    assert java_hash("Aa") == java_hash("BB")
    assert java_hash("Aa#BB") == java_hash("BB#Aa") == java_hash("Aa#Aa")

    async def go():
        async with running(tmp_path, log_segment_bytes=4 << 10) as kit:
            await kit.create("Aa")
            await kit.create("BB")
            await kit.put("Aa", [(b"Aa", b"of Aa")])
            await kit.put("BB", [(b"BB", b"of BB")])
            for _ in range(2):
                assert await kit.get("Aa", b"BB") is None
                assert await kit.get("BB", b"Aa") is None
                assert await kit.broker.query("Aa", b"BB") == []
                assert await kit.broker.query("BB", b"Aa") == []
                assert [r.value for r in await kit.broker.query("Aa", b"Aa")] == [b"of Aa"]
                assert [r.value for r in await kit.broker.query("BB", b"BB")] == [b"of BB"]
                for topic in ("Aa", "BB"):
                    await kit.put(topic, [(b"filler %d" % i, b"x" * 500) for i in range(10)])
                kit.broker.core.key_query.build_missing()
                assert (await kit.compact("Aa")).state == "done"
                assert (await kit.compact("BB")).state == "done"
            assert (await kit.map("Aa"))[b"Aa"] == b"of Aa"
            assert b"BB" not in await kit.map("Aa")

    run(go())
