"""What survives power loss, process death and failing disks: the log against a model of what was acknowledged."""

import errno
import os
from collections.abc import Iterator

import pytest
from firn_sim.batches import sized
from firn_sim.disk import SimDisk
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.batch import parse_header
from firn.errors import FirnError, Unavailable
from firn_node import failpoints
from firn_node.filecache import FileCache
from firn_node.log.commitlog import CommitLog
from firn_node.log.headpage import Slot, read_page
from firn_node.log.segment import segment_path

FOLDER = "/data/log"
SEGMENT_BYTES = 4096


def open_log(disk: SimDisk, *, verify_from: int = 0) -> CommitLog:
    return CommitLog.open(
        disk, FileCache(disk, 16), FOLDER, segment_bytes=SEGMENT_BYTES, verify_from=verify_from
    )


class Model:
    """A log and what it promised: ``batches`` by position, ``acknowledged`` bytes that no crash may take."""

    def __init__(self, seed: int) -> None:
        self.disk = SimDisk(seed)
        self.batches: dict[int, bytes] = {}
        self.pending: dict[int, bytes] = {}  # of an append whose outcome is unknown
        self.acknowledged = 0
        self.start = 0
        self.serial = 0
        self.log = open_log(self.disk)

    def append(self, sizes: list[int]) -> None:
        batches = [sized(size, self.serial + i) for i, size in enumerate(sizes)]
        self.serial += len(sizes)
        before = self.log.written_end
        planned = self.log.plan([len(b) for b in batches])
        self.pending = dict(zip(planned, batches, strict=True))
        try:
            if len(batches) == 1:  # as a request of one record comes
                header = parse_header(batches[0])
                positions = [self.log.append_one(batches[0], header.topic_id, header.append_timestamp)]
            else:
                positions = self.log.append(batches)
        except (OSError, Unavailable):
            assert self.log.written_end == before
            if not self.log.is_broken:
                self.pending = {}  # cut: it must not come back
            raise
        self.pending = {}
        assert positions == planned
        self.batches.update(zip(positions, batches, strict=True))

    def sync(self) -> None:
        wanted = self.log.written_end
        assert self.log.sync() == wanted == self.log.durable_end
        self.acknowledged = wanted

    def truncate(self, position: int) -> None:
        try:
            self.log.truncate(position)
            self.acknowledged = position
        finally:
            self._keep(self.log.start, self.log.written_end)
        self.pending = {}

    def release(self, before: int) -> None:
        try:
            self.log.release(before)
        finally:
            self._keep(self.log.start, self.log.written_end)
            self.acknowledged = max(self.acknowledged, self.log.durable_end)
        self.pending = {}

    def _keep(self, start: int, end: int) -> None:
        """What is no longer visible; a removal that failed may be undone by the crash."""
        self.start = start
        self.pending = {p: b for p, b in self.batches.items() if not start <= p < end}
        self.batches = {p: b for p, b in self.batches.items() if start <= p < end}

    def reopen(
        self, verify_from: int, *, released: tuple[int, ...] = (), truncated: tuple[int, ...] = ()
    ) -> None:
        """Recover and compare: a prefix of what was appended, no shorter than what was acknowledged."""
        self.log = open_log(self.disk, verify_from=verify_from)
        end = self.log.written_end
        assert self.log.start in (self.start, *released)
        assert end >= min([self.acknowledged, *truncated])
        assert end == self.log.durable_end
        self.start = self.log.start
        self.batches = {p: b for p, b in (self.batches | self.pending).items() if self.start <= p < end}
        self.pending = {}
        self.acknowledged = end
        self.check()

    def check(self) -> None:
        log, joined = self.log, b"".join(self.batches[p] for p in sorted(self.batches))
        assert log.written_end == log.start + len(joined)
        assert log.read(log.start, len(joined)) == joined if joined else log.start == log.written_end
        found = list(log.scan(log.start, log.written_end, chunk=1500))
        assert b"".join(data for _, data in found) == joined
        infos = log.segments()
        assert sum(t.bytes for i in infos for t in i.topics.values()) == len(joined)
        assert [i.start for i in infos[1:]] == [i.end for i in infos[:-1]]
        assert infos[0].start == log.start
        assert infos[-1].end == log.written_end


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(200, 3_000), min_size=1, max_size=6)),
        st.tuples(st.just("sync"), st.none()),
        st.tuples(st.sampled_from(("crash", "kill", "close")), st.sampled_from(("start", "durable"))),
        st.tuples(st.sampled_from(("truncate", "release")), st.integers(0, 1_000)),
    ),
    max_size=25,
)


@settings(max_examples=250, deadline=None)
@given(operations, st.integers(0, 2**32))
def test_acknowledged_bytes_outlive_crashes_and_nothing_comes_back_after_a_cut(
    steps: list, seed: int
) -> None:
    model = Model(seed)
    for name, argument in steps:
        if name == "append":
            model.append(argument)
        elif name == "sync":
            model.sync()
        elif name in ("truncate", "release"):
            choices = [p for p in sorted(model.batches) if p >= model.start] + [model.log.written_end]
            getattr(model, name)(choices[argument % len(choices)])
        else:
            durable = model.acknowledged if name != "close" else model.log.written_end
            if name == "close":
                model.log.close()
                model.acknowledged = durable
            else:
                getattr(model.disk, name)()
            model.reopen(durable if argument == "durable" else 0)
    model.check()


class Stopped(BaseException):
    """The process dies at a failpoint."""


@pytest.fixture
def failpoint() -> Iterator[list[str]]:
    """Steps reached; ``failpoints.hook`` is taken away again afterwards."""
    reached: list[str] = []
    yield reached
    failpoints.hook = None


def story(model: Model) -> Iterator[tuple[str, int]]:
    """Everything the log can do, over several segments; yields what is about to be removed."""
    for sizes in ([900, 900], [2_000, 2_500, 300], [3_000]):
        model.append(sizes)
        yield "", 0
        model.sync()
    model.append([400, 3_900, 400])
    positions = sorted(model.batches)
    yield "truncate", positions[-2]
    model.truncate(positions[-2])
    yield "truncate", positions[2]
    model.truncate(positions[2])
    model.append([3_000, 3_000, 500])
    model.sync()
    yield "release", sorted(model.batches)[-2]
    model.release(sorted(model.batches)[-2])
    model.append([700])
    yield "", 0
    model.log.close()


def run_until(model: Model, reached: list[str], stop_at: int) -> tuple[bool, tuple[str, int]]:
    """Run the story and die at the n-th step; whether it died, and what was going on."""

    def hook(name: str) -> None:
        reached.append(name)
        if len(reached) == stop_at:
            raise Stopped

    failpoints.hook = hook
    doing = ("", 0)
    try:
        for step in story(model):
            doing = step
    except Stopped:
        return True, doing
    finally:
        failpoints.hook = None
    return False, doing


@pytest.mark.parametrize("power", [True, False], ids=["power loss", "process death"])
def test_a_crash_at_any_step_leaves_the_log_before_or_after_that_operation(
    failpoint: list[str], power: bool
) -> None:
    run_until(Model(0), failpoint, 0)
    steps = len(failpoint)
    assert {n.split(".")[1] for n in failpoint} == {"append", "sync", "truncate", "release", "close"}
    for stop_at in range(1, steps + 1):
        for seed in range(4):
            model, reached = Model(seed), []
            died, (doing, position) = run_until(model, reached, stop_at)
            assert died, f"step {stop_at}, seed {seed}"
            model.disk.crash() if power else model.disk.kill()
            truncated = (position,) if doing == "truncate" else ()
            released = tuple(model.batches | model.pending) if doing == "release" else ()
            model.reopen(0, released=released, truncated=truncated)
            model.append([500])
            model.sync()
            model.check()


def test_a_second_crash_during_recovery_changes_nothing(failpoint: list[str]) -> None:
    for seed in range(12):
        model = Model(seed)
        model.append([900, 900, 3_000])
        model.sync()
        kept = dict(model.batches)
        model.append([2_000, 2_500, 300, 3_000])
        model.disk.crash()
        stops = ("log.recover.unlinked", "log.recover.dropped", "log.recover.rewritten", "log.recover.marked")
        for stop in stops:

            def hook(name: str, stop: str = stop) -> None:
                if name == stop:
                    raise Stopped

            failpoints.hook = hook
            try:
                open_log(model.disk)
            except Stopped:
                model.disk.crash()
            failpoints.hook = None
        model.reopen(0)
        assert {p: b for p, b in model.batches.items() if p in kept} == kept


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_every_failing_operation_loses_nothing_that_was_acknowledged(error: int) -> None:
    clean = Model(0)
    before = len(clean.disk.operations)
    for _ in story(clean):
        pass
    count = len(clean.disk.operations) - before
    for at in range(1, count + 1):
        for power in (True, False):
            model = Model(at)
            model.disk.fail(at, error)
            doing = ("", 0)
            try:
                for step in story(model):
                    doing = step
            except (OSError, FirnError):
                pass
            if not model.log.is_broken:
                model.append([300, 4_000])
                model.sync()
                model.check()
            model.disk.crash() if power else model.disk.kill()
            truncated = (doing[1],) if doing[0] == "truncate" else ()
            released = tuple(model.batches | model.pending) if doing[0] == "release" else ()
            model.reopen(0, truncated=truncated, released=released)


def test_a_full_disk_refuses_the_append_and_takes_it_once_there_is_room() -> None:
    model = Model(1)
    model.append([1_000])
    model.disk.capacity = 3 * 4096
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        model.append([3_000, 3_000, 3_000])
    model.check()
    assert not model.log.is_broken
    model.disk.capacity = 1 << 30
    model.append([3_000, 3_000, 3_000])
    model.sync()
    model.disk.crash()
    model.reopen(0)
    assert len(model.batches) == 4


def test_after_a_failed_fsync_nothing_is_acknowledged_and_reads_go_on() -> None:
    model = Model(2)
    model.append([1_000])
    model.sync()
    model.append([1_000])
    model.disk.fail(1, kinds={"sync"})
    with pytest.raises(OSError):
        model.log.sync()
    assert model.log.is_broken
    for call in (model.log.sync, lambda: model.log.append([sized(300, 9)])):
        with pytest.raises(Unavailable, match="sync failed"):
            call()
    model.check()


def test_bytes_that_a_failed_fsync_dropped_are_written_again_by_the_restart() -> None:
    for seed in range(10):
        model = Model(seed)
        model.append([1_000])
        model.sync()
        model.append([1_000, 3_500])
        model.disk.fail(1, kinds={"sync"})
        with pytest.raises(OSError):
            model.log.sync()
        model.disk.kill()
        model.reopen(0)
        assert len(model.batches) == 3
        model.disk.crash()
        model.reopen(model.acknowledged)
        assert len(model.batches) == 3


def test_a_name_that_came_back_after_a_failed_append_does_not_hide_later_appends() -> None:
    for seed in range(20):
        model = Model(seed)
        model.append([1_000])
        model.sync()
        model.disk.fail(2, errno.ENOSPC, kinds={"pwrite"})
        with pytest.raises(OSError):
            model.append([1_500, 3_000])  # the second one would begin a segment
        model.append([500, 500, 500, 500, 500])
        model.sync()
        model.disk.crash()
        model.reopen(0)
        assert len(model.batches) == 6


def newest_slot(disk: SimDisk, start: int = 0) -> Slot:
    found = read_page(disk, segment_path(FOLDER, start), start)[0].newest
    assert found is not None
    return found


def test_appends_between_two_syncs_share_a_slot_and_the_first_one_after_a_sync_writes_its_own() -> None:
    model = Model(1)
    made = newest_slot(model.disk).counter
    for sizes in ([300], [300], [300, 300], [300]):
        model.append(sizes)
        assert newest_slot(model.disk).counter == made + 1
    model.sync()
    for sizes in ([300, 300], [300]):
        model.append(sizes)
        slot = newest_slot(model.disk)
        assert (slot.counter, slot.durable_end) == (made + 2, model.acknowledged)


@pytest.mark.parametrize("sizes", [[300], [300, 300]])
def test_a_slot_that_a_failed_append_left_behind_is_replaced_by_the_next_append(sizes: list[int]) -> None:
    model = Model(1)
    model.append([300])
    model.sync()
    model.disk.fail(2, errno.ENOSPC, kinds={"pwrite"})  # its slot is written, its batches are not
    with pytest.raises(OSError):
        model.append([2_000])
    model.append(sizes)
    assert newest_slot(model.disk).end == model.log.written_end


@pytest.mark.parametrize("how", ["truncate", "release"])
def test_the_first_append_after_a_marker_replaces_it_whatever_wrote_it(how: str) -> None:
    model = Model(1)
    for _ in range(3):
        model.append([3_000])
    model.sync()
    model.append([300])
    if how == "release":  # with all of it durable its slot is a marker
        model.sync()
    getattr(model, how)(max(model.batches))
    assert newest_slot(model.disk, model.log.starts[-1]).is_marker
    model.append([300])
    assert not newest_slot(model.disk, model.log.starts[-1]).is_marker


@pytest.mark.parametrize("checkpoint", ["start", "slot", "end"])
def test_the_newest_append_time_survives_a_crash_although_no_slot_tells_it(checkpoint: str) -> None:
    disk = SimDisk(3)
    log = open_log(disk)
    first = sized(300, 0, append_ms=1_000)
    log.append_one(first, 8, 1_000)
    log.append_one(sized(300, 1, append_ms=9_000), 8, 9_000)
    log.sync()
    assert newest_slot(disk).append_ms == 1_000
    disk.crash()
    verify_from = {"start": 0, "slot": len(first), "end": log.durable_end}[checkpoint]
    assert open_log(disk, verify_from=verify_from).last_append_ms == 9_000


@pytest.mark.parametrize("seed", range(6))
def test_a_log_whose_creation_was_interrupted_survives_power_loss_after_the_restart(seed: int) -> None:
    disk = SimDisk(seed)

    def hook(name: str) -> None:
        if name == "log.create.written":
            raise Stopped

    failpoints.hook = hook
    try:
        with pytest.raises(Stopped):
            open_log(disk)
    finally:
        failpoints.hook = None
    disk.kill()
    log = open_log(disk)
    log.append([sized(500, 0)])
    log.sync()
    disk.crash()
    assert open_log(disk).read(0, log.written_end) == sized(500, 0)
