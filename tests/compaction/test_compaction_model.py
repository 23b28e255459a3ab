"""Any history of appends, tombstones, seals, compactions and restarts leaves the view that the rule says."""

import tempfile

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.compaction_kit import Partition, file_batches

KEYS = [b"", b"a", b"bb", *(b"key-%d" % i for i in range(20))]
TEXTS = st.sampled_from([None, "x", "tag", "é"])


@st.composite
def appends(draw):
    n = draw(st.integers(1, 12))
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=n, max_size=n))
    sizes = draw(st.lists(st.sampled_from([-1, 0, 3, 40, 5000]), min_size=n, max_size=n))
    extras = draw(st.booleans())
    tags = draw(st.lists(TEXTS, min_size=n, max_size=n)) if extras else None
    headers = [{"h": "v" * (i % 3), "i": str(i)} if i % 2 else None for i in range(n)] if extras else None
    queues = [("q",) * (i % 3) for i in range(n)] if extras else None
    return (
        "append",
        keys,
        sizes,
        tags,
        headers,
        queues,
        draw(st.sampled_from([0, 1, 2])),
        draw(st.integers(1, 5)),
    )


ACTIONS = st.one_of(
    appends(),
    appends(),
    appends(),
    st.tuples(st.just("seal")),
    st.tuples(
        st.just("compact"),
        st.integers(0, 30),  # rows that min lag keeps out
        st.sampled_from([0, 500, 10**9]),  # delete retention
        st.sampled_from([600, 4096, 40_000, 1 << 20]),  # segment bytes
        st.sampled_from([0.0, 0.25, 1.0]),  # min dead ratio
        st.booleans(),
        st.sampled_from([300, 1 << 60]),  # reclaim age
        st.sampled_from([64 << 10, 1 << 20]),
    ),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("wait"), st.integers(1, 400)),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, min_size=1, max_size=25))
def test_the_view_is_what_the_rule_says_after_any_history(actions):
    with tempfile.TemporaryDirectory() as folder:
        partition = Partition(folder)
        floor = generation = 0
        for action in actions:
            match action:
                case ("append", keys, sizes, tags, headers, queues, codec, epoch):
                    at = partition.end
                    values = [None if n < 0 else bytes([i + at & 255]) * n for i, n in enumerate(sizes)]
                    partition.append(
                        keys, values, tags=tags, headers=headers, queues=queues, codec=codec, epoch=epoch
                    )
                case ("seal",):
                    partition.seal()
                case ("compact", kept_out, retention, segment_bytes, ratio, force, age, memory):
                    partition.compact(
                        upto=max(partition.end - kept_out, 0), retention=retention, segment_bytes=segment_bytes,
                        min_dead_ratio=ratio, force=force, reclaim_age=age, memory=memory,
                    )  # fmt: skip
                    m = partition.compacted.manifest
                    if force:
                        assert m.masked == 0
                        assert sum(b.header.records for b in file_batches(partition)) == len(
                            partition.expected()
                        )
                    partition.check()
                case ("reopen",):
                    partition.open()
                case ("wait", ms):
                    partition.now.ms += ms
            m = partition.compacted.manifest
            assert m.tombstone_floor >= floor
            assert m.generation >= generation
            floor, generation = m.tombstone_floor, m.generation
        partition.check()
        partition.open()
        partition.check()
