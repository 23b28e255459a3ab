"""A standby is rebuilt under every fault of ``firn_sim.rebuild.group``: it ends with the same view, and no offset twice."""

import pytest
from firn_sim.rebuild.group import NotLive, RebuildGroup
from firn_sim.runs import REBUILD, run_for


def test_rebuilds_end_with_the_view_of_the_master_whatever_happens_meanwhile() -> None:
    reached = [RebuildGroup(seed).run() for seed in range(8)]
    for name in (
        "compactions",
        "dropped_tombstones",
        "released",
        "broken_pins",
        "restarts",
        "masters",
        "checks",
    ):
        assert sum(getattr(counts, name) for counts in reached), f"the runs are too tame: no {name}"
    assert all(counts.rebuilds == 1 and counts.starts_anew >= 1 for counts in reached)


def test_a_failing_rebuild_tells_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: RebuildGroup) -> None:
        raise NotLive("as asked for")

    monkeypatch.setattr(RebuildGroup, "_run", fails)
    tally = run_for(60.0, 17, REBUILD)
    assert [seed for seed, _ in tally.failures] == [17]
    assert tally.failures[0][1].endswith("replay: make simulate SEED=17 FAULTS=rebuild")
