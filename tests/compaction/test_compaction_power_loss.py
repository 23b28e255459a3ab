"""Power loss and failing disks at any write, by seed: what was not synced is lost or torn."""

import random

import pytest
from firn_sim.disk import SimDisk

from support.compaction_kit import Partition, run


class Crash(BaseException):
    """Stands for power loss: no handler of an Exception sees it."""


def work(partition, rng, jobs):
    """Appends, seals and compactions; the model follows each that is done."""
    for _ in range(4):
        n = rng.randint(1, 60)
        keys = [b"k%d" % rng.randint(0, 40) for _ in range(n)]
        partition.append(keys, [rng.choice([None, b"x", b"v" * 900]) for _ in keys])
        if rng.random() < 0.5:
            partition.seal()
        job = partition.job(
            retention=rng.choice([0, 1000]),
            segment_bytes=rng.choice([4096, 1 << 20]),
            force=rng.random() < 0.3,
        )
        jobs.append((job, partition.compacted.manifest.generation))
        run([job], partition.log, partition.now, min_dead_ratio=rng.choice([0.25, 0.9]))
        if job.result.state == "done":
            jobs.pop()
            partition.follow(job)
        partition.now.ms += 300


@pytest.mark.parametrize("seed", range(60))
def test_after_power_loss_at_any_write_the_old_or_the_new_state_is_served(seed):
    rng, disk, jobs = random.Random(seed), SimDisk(seed), []
    partition = Partition("/data", disk=disk)
    left = rng.randint(5, 120)

    def crash_in_time(_operation, _path):
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash

    disk.delay = crash_in_time
    try:
        work(partition, rng, jobs)
    except Crash:
        pass
    disk.delay = None
    before = partition.compacted.manifest.horizon
    disk.crash()
    partition.open()
    after = partition.compacted.manifest
    assert after.horizon >= before  # what a finished swap has served is not lost
    for job, generation in jobs:
        if after.generation > generation:
            partition.follow(job)
    partition.sealed = max(after.horizon, after.dirty[-1].end if after.dirty else 0)
    partition.check()
    work(partition, rng, [])
    partition.compact(force=True, retention=0)
    partition.check()


@pytest.mark.parametrize("seed", range(40))
def test_a_write_that_fails_ends_its_compaction_alone_and_the_next_one_succeeds(seed):
    rng, disk = random.Random(seed), SimDisk(seed)
    partition = Partition("/data", disk=disk)
    work(partition, rng, [])
    partition.seal()
    partition.append([b"k1", b"k2"], [b"1", None])
    disk.fail(rng.randint(1, 12))
    job = partition.job(retention=0, force=True)
    run([job], partition.log, partition.now)
    disk.heal()
    if job.result.state == "done":
        partition.follow(job)
    else:
        assert "OSError" in job.result.reason or "SwapUncertain" in job.result.reason
    assert partition.served() == partition.expected()
    partition.compact(force=True, retention=0)
    assert partition.served() == partition.expected()
    disk.crash()
    partition.open()
    partition.check()
