"""Plans of forced compactions over HTTP: every path, and what is refused."""

import asyncio
from typing import Any

import numpy as np

from firn import statement
from firn_node.server import plans
from server.serving import real, run

PLAN = "/v1/topics/t/compaction/plan"


def said(plan: dict[str, Any], slice: int, seen: list[int], dead: list[int]) -> bytes:
    part = plan["partitions"][0]
    subject = statement.Subject(
        plan=plan["id"], topic_id=plan["topic_id"], partition=part["partition"], slice=slice,
        slices=part["slices"], plan_end=part["plan_end"],
    )  # fmt: skip
    return b"".join(statement.encode(subject, np.array(seen, np.int64), np.array(dead, np.int64)))


def test_a_plan_is_made_followed_and_carried_out() -> None:
    async def main() -> None:
        async with real() as s:
            assert (await s.ask("GET", PLAN))[0] == 404
            for i in range(10):
                await s.ask("PUT", f"/v1/topics/t/records/k{i % 2}", data=b"%d" % i)
            status, plan, _ = await s.ask("POST", PLAN, json={"run": "nightly", "slice_records": 5})
            assert (status, plan["state"], plan["engine"], plan["run"]) == (201, "open", "spark", "nightly")
            assert [(p["plan_end"], p["slices"], p["missing"]) for p in plan["partitions"]] == [
                (10, 2, [0, 1])
            ]
            status, same, _ = await s.ask("POST", PLAN)
            assert (status, same["id"]) == (200, plan["id"])
            progress = {"phase": "mapping", "rows_read": 5}
            status, found, _ = await s.ask("PUT", f"{PLAN}/{plan['id']}", json={"progress": progress})
            assert (status, found["progress"]) == (200, progress)
            slices = f"{PLAN}/{plan['id']}/partitions/0/slices"
            status, found, _ = await s.ask("GET", f"{PLAN}/{plan['id']}/partitions/0")
            assert (status, found) == (200, plan["partitions"][0])
            status, found, _ = await s.ask(
                "PUT", f"{slices}/0", data=said(plan, 0, [0, 2, 4, 6, 8], [0, 2, 4, 6])
            )
            assert (status, found) == (200, {"partition": 0, "slice": 0, "missing": [1]})
            status, found, _ = await s.ask("PUT", f"{slices}/0", data=said(plan, 0, [0], []))
            assert (status, found["error"], found["slice"]) == (409, "already_uploaded", 0)
            data = said(plan, 1, [1, 3, 5, 7, 9], [1, 3, 5, 7])
            assert (await s.ask("PUT", f"{slices}/1", data=data))[0] == 200
            while found.get("state") != "done":
                await asyncio.sleep(0.02)
                _, found, _ = await s.ask("GET", PLAN)
            (row,) = found["partitions"]
            assert (row["state"], row["records_before"], row["records_after"], row["compared"]) == (
                "done", 10, 2, 10,
            )  # fmt: skip
            status, found, _ = await s.ask("POST", PLAN, json={"run": "nightly"})
            assert (status, found["id"], found["state"]) == (200, plan["id"], "done")

    run(main)


def test_what_makes_no_sense_is_refused_by_name() -> None:
    async def main() -> None:
        async with real() as s:
            await s.ask("PUT", "/v1/topics/t/records/k", data=b"1")
            for body in ({"run": 5}, {"slice_records": 0}, {"slice_records": True}, {"what": 1}):
                status, found, _ = await s.ask("POST", PLAN, json=body)
                assert (status, found["error"]) == (400, "invalid")
                assert next(iter(body)) in found["message"]
            _, plan, _ = await s.ask("POST", PLAN)
            path = f"{PLAN}/{plan['id']}"
            big = {"progress": {"text": "x" * plans._PROGRESS_BYTES_MAX}}
            for status, error, method, at, options in (
                (404, "unknown_plan", "PUT", f"{PLAN}/{'0' * 16}", {"json": {}}),
                (404, "unknown_plan", "DELETE", f"{PLAN}/{'0' * 16}", {}),
                (404, "unknown_partition", "PUT", f"{path}/partitions/7/slices/0", {"data": b"x"}),
                (400, "invalid", "PUT", f"{path}/partitions/0/slices/1", {"data": b"x"}),
                (400, "invalid", "PUT", f"{path}/partitions/0/slices/0", {"data": b"x"}),
                (400, "invalid", "PUT", path, {"json": {"progress": 5}}),
                (413, "limit_exceeded", "PUT", path, {"json": big}),
                (404, "unknown_topic", "POST", "/v1/topics/none/compaction/plan", {}),
            ):
                found = await s.ask(method, at, **options)
                assert (found[0], found[1]["error"]) == (status, error), (method, at)
            status, found, _ = await s.ask("DELETE", path)
            assert (status, found["state"]) == (200, "cancelled")
            status, found, _ = await s.ask("PUT", path, json={})
            assert (status, found["error"]) == (404, "unknown_plan")

    run(main)
