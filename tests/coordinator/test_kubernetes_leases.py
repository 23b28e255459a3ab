"""What the Kubernetes API can do to a coordinator, beyond the contract that holds for all of them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace

import pytest
from coordinator_kit import GROUP, LEASES, NAMESPACE, first_record, known, lease, lease_of, next_of, renewed
from kube_kit import Asked, FakeKubernetes, fake_kubernetes

from firn_node.coordinator import Absent, Coordinator, Done, Found, Refused, Unknown, Unreachable, Unusable
from firn_node.coordinator.kubernetes import RECORD, KubernetesCoordinator
from firn_node.kubernetes.api import Api, Object
from firn_node.replication.record import GroupRecord

NAME = lease_of(GROUP)
PATH = f"{LEASES}/{NAME}"

Test = Callable[[FakeKubernetes, KubernetesCoordinator], Awaitable[None]]


def handle_of(api: Api, lease_ttl_s: float = 60.0) -> KubernetesCoordinator:
    return KubernetesCoordinator(api, NAMESPACE, lease_of, lease_ttl_s=lease_ttl_s)


def run(test: Test, *, lease_ttl_s: float = 60.0, has_lease: bool = True) -> None:
    async def scene() -> None:
        async with fake_kubernetes() as server:
            if has_lease:
                server.put(PATH, lease(NAME))
            handle = handle_of(server.api(), lease_ttl_s)
            try:
                await test(server, handle)
            finally:
                await handle.close()

    asyncio.run(scene())


async def stored(handle: Coordinator, versions: int) -> GroupRecord:
    record = first_record()
    assert await handle.compare_and_set(record, expected_version=0) == Done(record)
    while record.version < versions:
        record = renewed(record)
        assert await handle.compare_and_set(record, expected_version=record.version - 1) == Done(record)
    return record


def on_write(fault: str, *, times: int = 1) -> Callable[[Asked], str | None]:
    left = [times]

    def disturb(asked: Asked) -> str | None:
        if asked.method == "GET" or not left[0]:
            return None
        left[0] -= 1
        return fault

    return disturb


def test_a_lease_that_is_not_there_is_waited_for_and_nobody_may_create_the_group() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        watch = handle.watch(GROUP)
        for answer in (await handle.read(GROUP), await next_of(watch)):
            assert isinstance(answer, Unreachable)
            assert f"Lease shop/{NAME}: there is no such Lease yet" in answer.reason
        swap = await handle.compare_and_set(first_record(), expected_version=0)
        assert isinstance(swap, Unknown)
        assert not list(server.writes())
        server.put(PATH, lease(NAME))
        assert await next_of(watch) == Absent()
        await watch.aclose()
        await stored(handle, 1)

    run(test, has_lease=False)


def test_a_lease_that_is_gone_is_refused_whether_or_not_an_empty_one_takes_its_place() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        record = await stored(handle, 3)
        watch = handle.watch(GROUP)
        assert await next_of(watch) == Found(record)
        server.remove(PATH)
        gone = [await next_of(watch), await handle.read(GROUP)]
        gone.append(await handle.compare_and_set(renewed(record), expected_version=3))
        server.put(PATH, lease(NAME))
        empty = [await handle.read(GROUP)]
        empty.append(await handle.compare_and_set(renewed(record), expected_version=3))
        for answer in gone + empty:
            assert isinstance(answer, Unusable), answer
            assert "version 3 was there" in answer.reason
        assert RECORD not in server.get(PATH)["metadata"].get("annotations", {})
        await watch.aclose()

    run(test)


def test_people_see_the_master_the_epoch_and_the_renewal_in_the_lease() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        record = await stored(handle, 2)
        spec = server.get(PATH)["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == (
            "node-0",
            1,
            60,
        )
        assert spec["renewTime"] > spec["acquireTime"]
        resigned = replace(renewed(record), master=None)
        await handle.compare_and_set(resigned, expected_version=2)
        assert "holderIdentity" not in server.get(PATH)["spec"]

    run(test)


def test_what_others_write_into_the_lease_neither_loses_a_swap_nor_is_lost() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        record = await stored(handle, 1)
        touched = server.get(PATH)
        server.put(PATH, {**touched, "metadata": {**touched["metadata"], "labels": {"team": "shop"}}})
        assert await handle.compare_and_set(renewed(record), expected_version=1) == Done(renewed(record))
        assert server.get(PATH)["metadata"]["labels"] == {"team": "shop"}

    run(test)


def test_a_conflict_on_every_second_write_delays_swaps_alone() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        writes = [0]

        def disturb(asked: Asked) -> str | None:
            writes[0] += asked.method == "PATCH"
            return "409" if asked.method == "PATCH" and writes[0] % 2 else None

        server.disturb = disturb
        assert (await stored(handle, 6)).version == 6
        assert writes[0] == 12

    run(test)


@pytest.mark.parametrize("fault", ["429", "500", "503", "cut"])
def test_a_swap_that_was_not_carried_out_is_unknown_and_the_next_one_is_done(fault: str) -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        record = await stored(handle, 1)
        server.disturb = on_write(fault)
        swap = await handle.compare_and_set(renewed(record), expected_version=1)
        assert isinstance(swap, Unknown)
        assert f"Lease shop/{NAME}" in swap.reason
        assert await handle.read(GROUP) == Found(record)
        assert await handle.compare_and_set(renewed(record), expected_version=1) == Done(renewed(record))

    run(test)


@pytest.mark.parametrize("fault", ["apply and hang", "apply and cut"])
def test_a_swap_whose_answer_is_lost_is_unknown_was_sent_once_and_is_found_by_a_read(fault: str) -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        other = handle_of(server.api())
        record = await stored(other, 1)
        assert await known(lambda: handle.read(GROUP)) == Found(record)
        sent = len(list(server.writes()))
        server.disturb = on_write(fault)
        assert isinstance(await handle.compare_and_set(renewed(record), expected_version=1), Unknown)
        assert len(list(server.writes())) == sent + 1
        assert await known(lambda: handle.read(GROUP)) == Found(renewed(record))
        again = await known(lambda: handle.compare_and_set(renewed(record), expected_version=1))
        assert again == Refused(renewed(record))
        await other.close()

    run(test, lease_ttl_s=4.0)


def test_a_server_that_does_not_answer_leaves_reads_and_swaps_without_knowledge() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        other = handle_of(server.api())
        record = await stored(other, 1)
        assert await known(lambda: handle.read(GROUP)) == Found(record)
        server.disturb = lambda asked: "hang"
        reading, swap = await asyncio.gather(
            handle.read(GROUP), handle.compare_and_set(renewed(record), expected_version=1)
        )
        assert isinstance(reading, Unreachable)
        assert "no answer within 0.5 s" in reading.reason
        assert isinstance(swap, Unknown)
        await other.close()

    run(test, lease_ttl_s=2.0)


def test_a_watch_goes_on_after_what_it_would_go_on_from_was_forgotten() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        other = handle_of(server.api())
        record = await stored(other, 1)
        watch = handle.watch(GROUP)
        assert await next_of(watch) == Found(record)
        for _ in range(3):
            server.forget()
            record = renewed(record)
            await other.compare_and_set(record, expected_version=record.version - 1)
            assert await next_of(watch) == Found(record)
        await watch.aclose()
        await other.close()

    run(test)


def test_a_watch_that_has_gone_silent_is_noticed_and_begun_again() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        other = handle_of(server.api())
        record = await stored(other, 1)
        watch = handle.watch(GROUP)
        while await next_of(watch) != Found(record):
            pass
        server.mute()
        record = renewed(record)
        await other.compare_and_set(record, expected_version=1)
        while await next_of(watch) != Found(record):
            pass
        server.mute(False)
        record = renewed(record)
        await other.compare_and_set(record, expected_version=2)
        while await next_of(watch) != Found(record):
            pass
        await watch.aclose()
        await other.close()

    run(test, lease_ttl_s=1.0)


def test_a_watch_says_that_the_server_is_away_and_goes_on_when_it_is_back() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        record = await stored(handle, 1)
        watch = handle.watch(GROUP)
        assert await next_of(watch) == Found(record)
        await server.stop()
        while not isinstance(await next_of(watch), Unreachable):
            pass
        swap = await handle.compare_and_set(renewed(record), expected_version=1)
        assert isinstance(swap, Unknown)
        await server.start()
        while await next_of(watch) != Found(record):
            pass
        await watch.aclose()
        assert await handle.compare_and_set(renewed(record), expected_version=1) == Done(renewed(record))

    run(test)


@pytest.mark.parametrize("fault", ["429", "410", "cut"])
def test_a_watch_that_is_refused_is_asked_for_less_and_less_often(fault: str) -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        record = await stored(handle, 1)
        server.disturb = lambda asked: fault if asked.query.get("watch") else None
        before = len(server.asked)
        watch = handle.watch(GROUP)
        assert await next_of(watch) == Found(record)

        def tries() -> list[float]:
            return [each.at for each in server.asked[before:] if not each.query and each.method == "GET"]

        async with asyncio.timeout(60):
            while len(tries()) < 6:  # each begins with a read
                await asyncio.sleep(0.01)
        # Pauses of at least 0.05, 0.1, 0.2, 0.4 and 0.8 s: half of what doubles.
        assert tries()[5] - tries()[0] >= 1.5
        await watch.aclose()

    run(test)


def test_a_steady_group_costs_one_write_a_renewal_and_no_reads() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        record = await stored(handle, 1)
        standby = handle_of(server.api())
        watch = standby.watch(GROUP)
        assert await next_of(watch) == Found(record)
        while not server.watching:
            await asyncio.sleep(0.001)
        before = len(server.asked)
        for _ in range(20):
            record = renewed(record)
            await handle.compare_and_set(record, expected_version=record.version - 1)
            while await next_of(watch) != Found(record):
                pass
        assert [asked.method for asked in server.asked[before:]] == ["PATCH"] * 20
        await watch.aclose()
        await standby.close()

    run(test)


@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        (json.dumps({**first_record().to_document(), "group_id": "7"}), "of group 7, not of 0"),
        (json.dumps({**first_record().to_document(), "in_sync": []}), "someone in sync"),
    ],
)
def test_a_damaged_record_is_named_and_not_replaced(annotation: str, why: str) -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        document = lease(NAME)
        document["metadata"]["annotations"] = {RECORD: annotation}
        server.put(PATH, document)
        watch = handle.watch(GROUP)
        swap = await handle.compare_and_set(first_record(), expected_version=0)
        for answer in (await handle.read(GROUP), await next_of(watch), swap):
            assert isinstance(answer, Unusable)
            assert why in answer.reason
        assert not list(server.writes())
        await watch.aclose()

    run(test)


class SlowReads:
    """Holds back the answers of reads that it was told to."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.gate: asyncio.Event | None = None

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Object | None = None,
        content: str = "application/json", within_s: float = 10.0,
    ) -> Object:  # fmt: skip
        found = await self._api.request(
            method, path, query=query, body=body, content=content, within_s=within_s
        )
        if method == "GET" and (gate := self.gate) is not None:
            self.gate = None
            await gate.wait()
        return found

    def watch(
        self, path: str, query: Mapping[str, str], *, within_s: float = 10.0
    ) -> AsyncGenerator[Object, None]:
        return self._api.watch(path, query, within_s=within_s)

    async def close(self) -> None:
        await self._api.close()


def test_a_read_that_a_swap_overtakes_is_no_older_copy_put_back() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        slow = SlowReads(server.api())
        one = handle_of(slow)
        record = await stored(one, 1)
        slow.gate = gate = asyncio.Event()
        asked = len(server.asked)
        reading = asyncio.create_task(one.read(GROUP))
        while len(server.asked) == asked:
            await asyncio.sleep(0.001)
        assert await one.compare_and_set(renewed(record), expected_version=1) == Done(renewed(record))
        gate.set()
        assert await reading == Found(renewed(record))
        await one.close()

    run(test)


def test_a_closed_handle_answers_that_it_is() -> None:
    async def test(server: FakeKubernetes, handle: KubernetesCoordinator) -> None:
        record = await stored(handle, 1)
        await handle.close()
        assert isinstance(await handle.read(GROUP), Unreachable)
        swap = await handle.compare_and_set(renewed(record), expected_version=1)
        assert isinstance(swap, Unknown)
        assert "closed" in swap.reason
        with contextlib.suppress(StopAsyncIteration):
            pytest.fail(f"told {await anext(handle.watch(GROUP))}")

    run(test)
