"""What every coordinator keeps. A further implementation adds its site to ``SITES`` and passes as it is."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_kit import (
    GROUP,
    ApiServerSite,
    FakeKubernetesSite,
    MemorySite,
    Site,
    SqliteSite,
    first_record,
    next_of,
    renewed,
)

from firn.errors import InvariantBroken
from firn_node.coordinator import Absent, Coordinator, Done, Found, Refused, Unknown, Unusable
from firn_node.replication.record import GroupId, GroupRecord

SITES: dict[str, Callable[[Path], Site]] = {
    "memory": MemorySite,
    "sqlite": SqliteSite,
    "kubernetes": FakeKubernetesSite,
}
API_SERVER = "API server"


@pytest.fixture(params=[*SITES, pytest.param(API_SERVER, marks=pytest.mark.apiserver)])
def run(request: pytest.FixtureRequest, tmp_path: Path):
    """Runs a test with two handles of one store."""
    if request.param == API_SERVER:
        kubeconfig = request.getfixturevalue("apiserver").kubeconfig

        def make() -> Site:
            return ApiServerSite(kubeconfig)
    else:

        def make() -> Site:
            return SITES[request.param](tmp_path)

    def run(test: Callable[[Site, Coordinator, Coordinator], Awaitable[None]]) -> None:
        async def scene() -> None:
            site = make()
            await site.begin()
            one, other = site.handle(), site.handle()
            try:
                await test(site, one, other)
            finally:
                await one.close()
                await other.close()
                await site.end()

        asyncio.run(scene())

    return run


class TestContract:
    def test_a_group_without_a_record_is_absent(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            assert await one.read(GROUP) == Absent()

        run(test)

    def test_what_one_stored_the_other_reads(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            record = first_record()
            assert await one.compare_and_set(record, expected_version=0) == Done(record)
            assert await other.read(GROUP) == Found(record)
            following = renewed(record)
            assert await other.compare_and_set(following, expected_version=1) == Done(following)
            assert await one.read(GROUP) == Found(following)

        run(test)

    def test_groups_do_not_touch_one_another(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            records = [first_record(GroupId(name)) for name in ("0", "1")]
            for record in records:
                await one.compare_and_set(record, expected_version=0)
            await one.compare_and_set(renewed(records[0]), expected_version=1)
            assert await other.read(GroupId("1")) == Found(records[1])
            assert await other.read(GroupId("2")) == Absent()

        run(test)

    def test_a_stale_expectation_is_refused_with_what_is_there(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            first = first_record()
            await one.compare_and_set(first, expected_version=0)
            second = renewed(first)
            await one.compare_and_set(second, expected_version=1)
            assert await other.compare_and_set(renewed(first), expected_version=1) == Refused(second)
            assert await other.compare_and_set(first_record(), expected_version=0) == Refused(second)
            assert await other.read(GROUP) == Found(second)

        run(test)

    def test_a_change_of_a_group_that_has_no_record_is_refused(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            assert await one.compare_and_set(renewed(first_record()), expected_version=1) == Refused(None)
            assert await one.read(GROUP) == Absent()

        run(test)

    def test_a_change_that_breaks_an_invariant_is_a_bug_and_is_not_stored(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            record = first_record()
            await one.compare_and_set(record, expected_version=0)
            for wrong in (
                replace(record, version=3),
                replace(renewed(record), in_sync=frozenset()),
                replace(renewed(record), renewals=-1),
            ):
                with pytest.raises(InvariantBroken):
                    await one.compare_and_set(wrong, expected_version=1)
            assert await other.read(GROUP) == Found(record)
            assert await one.compare_and_set(renewed(record), expected_version=1) == Done(renewed(record))

        run(test)

    def test_of_writers_that_race_for_a_version_one_wins(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            record = first_record()
            await one.compare_and_set(record, expected_version=0)
            for _ in range(20):
                swaps = await asyncio.gather(
                    *(
                        h.compare_and_set(renewed(record), expected_version=record.version)
                        for h in (one, other)
                    )
                )
                record = renewed(record)
                assert sorted(type(swap).__name__ for swap in swaps) == ["Done", "Refused"]
                assert Refused(record) in swaps

        run(test)

    def test_writers_that_read_again_after_each_refusal_lose_no_count(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            await one.compare_and_set(first_record(), expected_version=0)

            async def count(handle: Coordinator) -> None:
                done = 0
                while done < 15:
                    found = await handle.read(GROUP)
                    assert isinstance(found, Found)
                    swap = await handle.compare_and_set(
                        renewed(found.record), expected_version=found.record.version
                    )
                    done += isinstance(swap, Done)

            await asyncio.gather(count(one), count(other))
            found = await one.read(GROUP)
            assert isinstance(found, Found)
            assert (found.record.version, found.record.renewals) == (31, 30)

        run(test)

    def test_a_swap_whose_answer_is_lost_is_unknown_and_settled_by_a_higher_version(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            record = first_record()
            await one.compare_and_set(record, expected_version=0)
            async with site.losing_an_answer() as unlucky:
                swap = await unlucky.compare_and_set(renewed(record), expected_version=1)
                assert isinstance(swap, Unknown)
                assert swap.reason
            assert await other.read(GROUP) == Found(renewed(record))
            assert await other.compare_and_set(renewed(record), expected_version=1) == Refused(
                renewed(record)
            )

        run(test)

    def test_a_store_that_takes_no_swaps_gives_unknown_and_serves_again_afterwards(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            record = first_record()
            await one.compare_and_set(record, expected_version=0)
            async with site.disturbed(one):
                assert isinstance(await one.compare_and_set(renewed(record), expected_version=1), Unknown)
            assert await other.read(GROUP) == Found(record)
            assert await one.compare_and_set(renewed(record), expected_version=1) == Done(renewed(record))

        run(test)

    def test_what_is_done_outlives_the_handle_that_did_it(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            record = first_record()
            await one.compare_and_set(record, expected_version=0)
            await one.close()
            later = site.handle()
            assert await later.read(GROUP) == Found(record)
            assert await later.compare_and_set(renewed(record), expected_version=1) == Done(renewed(record))
            await later.close()

        run(test)

    def test_a_handle_goes_back_to_no_older_version_and_another_one_may_begin_with_it(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            first, second = first_record(), renewed(first_record())
            await one.compare_and_set(first, expected_version=0)
            await one.compare_and_set(second, expected_version=1)
            watch = one.watch(GROUP)
            assert await next_of(watch) == Found(second)
            await site.put_back(first)
            for answer in (
                await next_of(watch),
                await one.read(GROUP),
                await one.compare_and_set(second, expected_version=1),
                await one.compare_and_set(renewed(second), expected_version=2),
            ):
                assert isinstance(answer, Unusable), answer
                assert "version 2 was there, now 1" in answer.reason
            await watch.aclose()
            assert await other.read(GROUP) == Found(first)

        run(test)

    def test_a_watch_begins_with_what_is_there_and_tells_each_newest_version(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            watch = one.watch(GROUP)
            assert await next_of(watch) == Absent()
            record = first_record()
            await other.compare_and_set(record, expected_version=0)
            assert await next_of(watch) == Found(record)
            await one.compare_and_set(renewed(record), expected_version=1)  # an own change, too
            assert await next_of(watch) == Found(renewed(record))
            await watch.aclose()

        run(test)

    def test_a_watch_goes_forward_alone_and_never_misses_the_newest_version(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            last = 40

            async def write() -> None:
                record = first_record()
                await other.compare_and_set(record, expected_version=0)
                while record.version < last:
                    record = renewed(record)
                    swap = await other.compare_and_set(record, expected_version=record.version - 1)
                    assert swap == Done(record)
                    if record.version % 8 == 0:
                        await asyncio.sleep(0.02)

            writing = asyncio.create_task(write())
            watch, versions = one.watch(GROUP), [0]
            while versions[-1] < last:
                reading = await next_of(watch)
                versions.append(reading.record.version if isinstance(reading, Found) else 0)
            await writing
            assert versions[1:] == sorted(set(versions[1:]))
            await watch.aclose()

        run(test)

    def test_a_watch_ends_with_its_handle(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            seen: list[object] = []

            async def follow() -> None:
                async for reading in one.watch(GROUP):
                    seen.append(reading)

            following = asyncio.create_task(follow())
            while not seen:
                await asyncio.sleep(0.001)
            await one.close()
            await one.close()
            async with asyncio.timeout(20):
                await following
            assert seen == [Absent()]

        run(test)

    def test_every_field_of_a_record_comes_back(self, run) -> None:
        async def test(site: Site, one: Coordinator, other: Coordinator) -> None:
            record = first_record(GroupId("ä/1"))
            resigned = replace(renewed(record), master=None, successor=next(iter(record.in_sync)))
            await one.compare_and_set(record, expected_version=0)
            await one.compare_and_set(resigned, expected_version=1)
            found = await other.read(record.group_id)
            assert isinstance(found, Found)
            assert_same(found.record, resigned)

        run(test)


def assert_same(found: GroupRecord, expected: GroupRecord) -> None:
    assert found == expected
    assert found.to_document() == expected.to_document()
