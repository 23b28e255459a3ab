"""Random histories against a model: whatever is appended, sealed, compacted and restarted, in any order and with
any thresholds, the compacted view ends in the model's map, offsets never change, nothing is resurrected.
"""

import tempfile
from dataclasses import dataclass, field

from engine_kit import Kit, run, settings
from hypothesis import HealthCheck, given, note
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from firn.batch import Codecs
from firn.record import Record
from firn_node.engine.broker import Broker

KEYS = [b"", b"a", b"b", b"c", b"dd", b"e" * 40]

rows = st.lists(
    st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), st.binary(max_size=30))), min_size=1, max_size=12
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), rows, st.integers(0, 2)),
        st.tuples(st.just("put"), rows, st.integers(0, 2)),
        st.tuples(st.just("compact"), st.booleans(), st.none()),
        st.tuples(st.just("seal"), st.none(), st.none()),
        st.tuples(st.just("checkpoint"), st.none(), st.none()),
        st.tuples(st.just("restart"), st.booleans(), st.none()),
        st.tuples(
            st.just("update"), st.sampled_from(["0s", "1h"]), st.sampled_from(["4Ki", "64Ki", "256Mi"])
        ),
    ),
    max_size=25,
)


@dataclass
class Model:
    """Every record ever acknowledged, by offset; and what a tombstone's removal may have taken."""

    records: list[tuple[bytes, bytes | None]] = field(default_factory=list)

    def map(self) -> dict[bytes, bytes]:
        found = dict(self.records)
        return {k: v for k, v in found.items() if v is not None}

    def newest(self) -> dict[bytes, int]:
        return {key: offset for offset, (key, _) in enumerate(self.records)}


def check_view(model: Model, view: list[Record], *, horizon: int, forced: bool) -> None:
    offsets = [r.offset for r in view]
    assert offsets == sorted(set(offsets)), "offsets ascend"
    for record in view:
        assert (record.key, record.value) == model.records[record.offset], "a retained offset never changes"
    newest = model.newest()
    shown = set(offsets)
    for key, offset in newest.items():
        if model.records[offset][1] is not None or offset >= horizon:
            assert offset in shown, f"the newest record of {key!r}, offset {offset}, is missing"
    below = [r.key for r in view if r.offset < horizon]
    assert len(below) == len(set(below)), "one record per key below the horizon"
    if forced:
        assert all(newest[r.key] == r.offset for r in view), (
            "after a forced compaction only the newest are left"
        )


async def check(kit: Kit, model: Model, *, forced: bool = False) -> None:
    view = await kit.read("t")
    horizon = kit.broker.partitions.get(kit.broker.topic("t"), 0).horizon
    check_view(model, view, horizon=horizon, forced=forced)
    assert await kit.map("t") == model.map()
    for key in KEYS:
        assert await kit.get("t", key) == model.map().get(key), f"get({key!r})"


async def play(folder: str, history: list[tuple[str, object, object]], index: str) -> None:
    options = {"log_segment_bytes": 8 << 10, "index": index}
    kit = Kit(Broker(settings(folder, **options)))
    await kit.broker.start()
    await kit.create(compaction={"deleteRetention": "0s", "memory": "64Ki"})
    model = Model()
    try:
        for operation, first, second in history:
            forced = False
            if operation == "put":
                codecs = Codecs(second, second, second)  # type: ignore[arg-type]
                appended = await kit.put("t", first, codecs=codecs)  # type: ignore[arg-type]
                assert appended.base_offset == len(model.records)
                model.records.extend(first)  # type: ignore[arg-type]
            elif operation == "compact":
                forced = bool(first)
                result = await kit.compact("t", force=forced)
                assert result.partitions[0].state == "done", result.partitions[0].reason
            elif operation == "seal":
                kit.broker.parts.sealer.seal(kit.broker.partitions.get(kit.broker.topic("t"), 0))
            elif operation == "checkpoint":
                await kit.broker.checkpoint()
            elif operation == "update":
                spec = {"compaction": {"deleteRetention": first, "segmentBytes": second, "memory": "64Ki"}}
                await kit.broker.update_topic("t", kit.spec(spec))
            else:
                await kit.broker.stop()
                kit = Kit(Broker(settings(folder, **options)))
                await kit.broker.start()
            await check(kit, model, forced=forced)
    finally:
        await kit.broker.stop()


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations)
def test_any_history_ends_in_the_models_map(history):
    note(f"history: {history!r}")
    with tempfile.TemporaryDirectory() as folder:
        run(play(folder, history, "rocksdb"))


@hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations)
def test_any_history_ends_in_the_models_map_with_the_index_on_files(history):
    note(f"history: {history!r}")
    with tempfile.TemporaryDirectory() as folder:
        run(play(folder, history, "files"))
