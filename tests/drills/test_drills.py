"""Short drills of real processes; ``firn drill all`` runs all of them, with their bounds of time."""

import asyncio
import random
from pathlib import Path

import pytest

from firn_node.drills.catalogue import DRILLS
from firn_node.drills.verdict import Settings, run_drill


@pytest.mark.parametrize("name", ["kill-master", "isolate-master"])
def test_a_drill_finds_nothing_lost_doubled_or_shown_wrong(name: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    settings = Settings(ttl_s=1.5, holds_times=False, data=tmp_path / "drill", say=print)
    print(f"firn drill run {name} --lease-ttl 1500ms --seed {seed}")
    result = asyncio.run(run_drill(DRILLS[name], seed, settings))
    print(result)
    assert result.why == []
    assert result.acknowledged > 100, "the group was not under load"
    assert result.elections >= 1
    assert result.read > result.acknowledged
