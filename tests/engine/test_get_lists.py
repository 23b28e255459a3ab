"""``get`` of lists of keys and of single ones: masked, dirty, compressed, doubtful and damaged rows."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from firn.batch import Codec, Codecs
from firn.errors import Corrupt
from firn.partitioner import partition_of
from firn.values import LATER
from firn_node.compaction import view
from firn_node.compaction.answers import Answers, joined
from firn_node.compaction.keyindex import ArrayKeyIndex, candidates, newest_rows
from support.engine_kit import Kit, run, running

SEED = 2011
CODECS = [Codecs(), Codecs(values=Codec.LZ4), Codecs(keys=Codec.ZSTD, values=Codec.ZSTD)]
COLUMNS: list[dict[str, Any]] = [{}, {"tags": "red", "headers": {"a": "b"}}]


async def _filled(kit: Kit, codecs: Codecs, columns: dict[str, Any]) -> dict[bytes, bytes | None]:
    """Clean rows, rows that a later compaction masked, with their tombstones gone or not, dirty rows."""
    random = Random(SEED)
    await kit.create("t", compaction={"segmentBytes": "30Ki", "deleteRetention": "0s"})
    model: dict[bytes, bytes | None] = {}
    for step, force in ((1, True), (7, False), (41, None)):
        rows: list[tuple[bytes, bytes | None]] = [
            (
                b"key%d" % n,
                None if random.random() < 0.1 else b"%d/%d" % (n, step) + b"v" * random.randrange(40),
            )
            for n in range(0, 3000, step)
        ]
        await kit.put("t", rows, codecs=codecs, **{name: [v] * len(rows) for name, v in columns.items()})
        model.update(rows)
        if force is not None:
            await _sealed(kit)
            assert (await kit.compact("t", force=force)).state == "done"
    return model


async def _sealed(kit: Kit) -> None:
    """Make what is active a sealed segment: a compaction that nobody forces takes no other."""
    partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
    await kit.get("t", b"none")
    kit.broker.parts.sealer.seal(partition)
    while partition.sealing:
        await asyncio.sleep(0.005)


async def _check(kit: Kit, model: dict[bytes, bytes | None], columns: dict[str, Any]) -> None:
    keys = [*model, b"", b"none", b"key1", b"key1"]
    Random(SEED).shuffle(keys)
    many = await kit.broker.get("t", keys)
    for key, found in zip(keys, many, strict=True):
        assert (found and found.value) == model.get(key), f"{key!r}, seed {SEED}"
        if found is not None:
            assert (found.tag, found.headers) == (columns.get("tags"), columns.get("headers", {}))
    for key, found in list(zip(keys, many, strict=True))[:300]:
        assert await kit.broker.get("t", [key]) == [found], f"{key!r}, seed {SEED}"
    assert await kit.broker.get("t", keys[:3]) == many[:3]


@pytest.mark.parametrize("codecs", CODECS, ids=["plain", "lz4 values", "zstd"])
@pytest.mark.parametrize("columns", COLUMNS, ids=["bare", "tagged"])
def test_a_list_of_keys_gets_what_each_key_gets_alone(
    tmp_path: Path, codecs: Codecs, columns: dict[str, Any]
) -> None:
    async def main() -> None:
        async with running(tmp_path, min_dead_ratio=0.9) as kit:
            model = await _filled(kit, codecs, columns)
            log = kit.broker.partitions.get(kit.broker.topic("t"), 0).log
            assert log.stats().masked, (log.manifest, "the case of masked rows is missing")
            await _check(kit, model, columns)
            keys = list(model)
            wanted = kit.broker.parts.lookup.wanted(log.manifest.topic_id, *joined(keys))
            hashes = zip(wanted.hi.tolist(), wanted.lo.tolist(), strict=True)
            alone = [log.newest(key, h, l) for key, (h, l) in zip(keys, hashes, strict=True)]
            assert None in alone, "the case of masked tombstones is missing"
            answers = Answers(len(keys))
            log.newest_many(wanted, np.arange(len(keys)), answers)
            doubtful = set(answers.doubtful())
            assert len(doubtful) < len(keys) // 2, "most are told at once"
            for pick, row in enumerate(alone):
                if pick not in doubtful:
                    value = None if row is None or row.value is None else row
                    assert answers.row(pick) == value, f"{keys[pick]!r}, seed {SEED}"

    run(main())


async def _even(kit: Kit) -> dict[bytes, bytes | None]:
    """Keys of one length, values of one length: clean rows with gaps of offsets, tombstones, dirty rows."""
    await kit.create("t", compaction={"deleteRetention": "0s"})
    model: dict[bytes, bytes | None] = {}
    for step, compacted in ((1, False), (3, True), (5, False)):
        rows: list[tuple[bytes, bytes | None]] = [
            (b"key%05d" % n, b"%05d/%02d" % (n, step) * 12) for n in range(0, 4000, step)
        ]
        await kit.put("t", rows)
        model.update(rows)
        if compacted:
            await kit.compact("t")
    gone: list[tuple[bytes, bytes | None]] = [(b"key%05d" % n, None) for n in range(0, 4000, 2)]
    await kit.put("t", gone)
    return model | dict(gone)


async def _few_at_a_time(kit: Kit, model: dict[bytes, bytes | None]) -> None:
    partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
    keys = [*model, b"", b"none", b"key00001", b"key0000"]
    Random(SEED).shuffle(keys)
    for at in range(0, len(keys), 7):
        some = keys[at : at + 7]
        found = kit.broker.parts.lookup.get(partition, some)
        assert [row and row.value for row in found] == [model.get(key) for key in some], f"seed {SEED}"
        assert found == [kit.broker.parts.lookup.get(partition, [key])[0] for key in some], f"seed {SEED}"


def test_a_few_rows_of_each_batch_are_what_each_key_gets_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as kit:
            model = await _even(kit)
            await _few_at_a_time(kit, model)
            await kit.compact("t")
            await _few_at_a_time(kit, model)

    run(main())


def test_rows_of_other_keys_under_the_same_fingerprint_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any) -> NDArray[np.int64]:
        rows = newest_rows(*args)
        hits = rows >= 0
        rows[hits] = np.roll(rows[hits], 1)
        return rows

    async def main() -> None:
        async with running(tmp_path / "uneven", min_dead_ratio=0.9) as kit:
            model = await _filled(kit, Codecs(), {})
            monkeypatch.setattr(view, "newest_rows", wrong)
            await _check(kit, model, {})
        async with running(tmp_path / "even") as kit:
            model = await _even(kit)
            await kit.compact("t")
            await _few_at_a_time(kit, model)

    run(main())


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("size", [100, 101])  # of odd keys: values of one length, or not
@pytest.mark.parametrize("count", [8, 4000])  # a few rows of a batch, or many
def test_what_does_not_fit_an_answer_is_said_to_be_left_out(
    tmp_path: Path, is_compacted: bool, size: int, count: int
) -> None:
    async def main() -> None:
        async with running(tmp_path) as kit:
            await kit.create("t", partitions=2)
            keys = [b"key%05d" % n for n in range(4000)]
            for number in (0, 1):
                mine = [key for key in keys if partition_of(key, 2) == number]
                rows = [(key, b"v" * (size if int(key[3:]) % 2 else 100)) for key in mine]
                await kit.put("t", rows, partition=number)
            if is_compacted:
                await kit.compact("t")
            left, seen, rounds = [*keys[:count], b"none"], 0, 0
            while left:
                answers = await kit.broker.get_many("t", *joined(left), bytes_max=300)
                found = [key for pick, key in enumerate(left) if answers.lengths[pick] >= 0]
                assert all(answers.row(left.index(key)) is not None for key in found)
                later = [key for pick, key in enumerate(left) if answers.lengths[pick] == LATER]
                assert b"none" not in later
                assert len(later) < len(left), "none was answered"
                left, seen, rounds = later, seen + len(found), rounds + 1
            assert (seen, rounds) == (count, 2 if count == 4000 or size == 100 else 3)

    run(main())


@pytest.mark.parametrize("count", [1, 50])
def test_a_damaged_value_is_corrupt_at_the_first_touch(tmp_path: Path, count: int) -> None:
    async def main() -> None:
        async with running(tmp_path) as kit:
            await kit.create("t")
            await kit.put("t", [(b"key%d" % n, b"value %d." % n) for n in range(100)])
            await kit.compact("t")
            log = kit.broker.partitions.get(kit.broker.topic("t"), 0).log
            file = Path(log.path(log.manifest.segments[0].name))
            good = file.read_bytes()
            at = good.index(b"value 99.")
            file.write_bytes(good[:at] + b"V" + good[at + 1 :])
            with pytest.raises(Corrupt, match=file.name):
                await kit.broker.get("t", [b"key%d" % n for n in range(count)])
            file.write_bytes(good)
            assert await kit.get("t", b"key99") == b"value 99."

    run(main())


def test_the_newest_row_is_told_by_one_block_or_left_to_the_candidates() -> None:
    random = np.random.default_rng(SEED)
    pool = random.integers(0, 1 << 64, 3000, np.uint64)
    hi = np.sort(np.concatenate([random.choice(pool, 8000), np.full(5000, pool[7])]))
    low = random.integers(0, 3, len(hi), np.uint64)
    word = low << np.uint64(32) | random.permutation(len(hi)).astype(np.uint64) << np.uint64(1)
    order = np.lexsort((word, hi))
    index = ArrayKeyIndex(hi[order], word[order])
    wanted = np.concatenate([pool, random.integers(0, 1 << 64, 100, np.uint64), index.fences])
    lows = random.integers(0, 4, len(wanted), np.uint32)
    found = newest_rows(index, wanted, lows)
    expected = [(candidates(index, int(h), int(l)) or [-1])[0] for h, l in zip(wanted, lows, strict=True)]
    told = found != -2
    assert found[told].tolist() == np.array(expected)[told].tolist(), f"seed {SEED}"
    assert np.count_nonzero(~told) < 20, "nearly all is told at once"
