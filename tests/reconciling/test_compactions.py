"""Forced compactions that are asked for by a resource."""

import asyncio
from datetime import timedelta

import pytest
from operator_kit import NAMESPACE, SPARK_IMAGE, Request, World, new_operator, rounds

from firn.errors import Forbidden
from firn_operator.compactions import WAIT_S, parse_job
from firn_operator.kube import COMPACTION, CONFIG_MAP, JOB, POD, ROLE_BINDING, SERVICE_ACCOUNT, Obj, name_of
from firn_operator.reconcile import Key


@pytest.fixture
def world() -> World:
    made = World()
    made.cluster()
    made.topic("quotes")
    asyncio.run(rounds(made, new_operator(made), 15))
    return made


def go(world: World, count: int = 10, *, spark_image: str = SPARK_IMAGE) -> None:
    asyncio.run(rounds(world, new_operator(world, spark_image=spark_image), count))


def status(world: World, name: str) -> dict[str, object]:
    found = world.find(COMPACTION, name)
    assert found is not None
    return dict(found["status"])


def test_a_run_is_asked_of_the_brokers_and_its_result_kept(world: World) -> None:
    world.force("now", "quotes", engine="broker")
    go(world)
    shown = status(world, "now")
    assert (shown["phase"], shown["engine"], shown["progress"]) == ("Succeeded", "broker", "1/1")
    assert shown["partitions"] == [
        {"partition": 0, "state": "done", "recordsBefore": 10, "recordsAfter": 4, "seconds": 0.5}
    ]
    assert {"CompactionStarted", "CompactionDone"} <= set(world.events())


def test_a_run_that_has_ended_is_written_nothing_to_and_goes_after_its_time(world: World) -> None:
    world.force("now", "quotes", ttlSecondsAfterFinished=60)
    go(world)
    before = len(world.requests)
    go(world, 3)
    assert world.writes(before) == []
    world.now += timedelta(seconds=61)
    go(world, 3)
    assert world.find(COMPACTION, "now") is None


def test_two_runs_of_a_topic_come_one_after_the_other(world: World) -> None:
    world.force("a", "quotes")
    world.force("b", "quotes")
    go(world, 3)
    assert (status(world, "a")["phase"], status(world, "b")["phase"]) == ("Running", "Pending")
    assert "a compacts the topic before it" in world.condition(COMPACTION, "b", "Complete")["message"]
    go(world, 20)
    assert (status(world, "a")["phase"], status(world, "b")["phase"]) == ("Succeeded", "Succeeded")


def test_a_run_by_spark_waits_where_the_operator_knows_no_image(world: World) -> None:
    world.force("now", "quotes", engine="spark")
    go(world, 3, spark_image="")
    assert status(world, "now")["phase"] == "Pending"
    assert world.condition(COMPACTION, "now", "Complete")["reason"] == "EngineUnavailable"
    assert world.compactions == {}
    go(world, 3)
    assert status(world, "now")["phase"] == "Running"


def test_a_run_of_a_topic_that_is_not_there_waits_and_says_so(world: World) -> None:
    world.force("now", "nothing")
    go(world, 3)
    assert world.condition(COMPACTION, "now", "Complete")["message"] == "there is no topic nothing"


def test_a_run_that_is_deleted_is_cancelled(world: World) -> None:
    world.force("now", "quotes")
    go(world, 3)
    world.end(COMPACTION, "now")
    go(world, 2)
    assert world.cancelled == ["quotes"]
    assert world.find(COMPACTION, "now") is None


def test_a_run_that_the_brokers_have_forgotten_is_asked_for_again(world: World) -> None:
    world.force("now", "quotes")
    go(world, 3)
    world.compactions.clear()
    go(world)
    assert status(world, "now")["phase"] == "Succeeded"


# Spark.


def driver(world: World) -> Obj:
    [job] = world.all(JOB)
    return job


def test_an_automatic_run_of_a_small_topic_is_the_brokers_and_says_why(world: World) -> None:
    world.force("now", "quotes")
    go(world)
    assert (status(world, "now")["phase"], status(world, "now")["engine"]) == ("Succeeded", "broker")
    assert status(world, "now")["engineReason"] == "the topic has 1Mi to compact, and Spark pays from 16Gi on"
    assert world.all(JOB) == []


def test_an_automatic_run_of_a_large_topic_is_sparks_and_says_why(world: World) -> None:
    world.topic_bytes = 20 << 30
    world.force("now", "quotes")
    go(world, 3)
    shown = status(world, "now")
    assert (shown["phase"], shown["engine"], shown["runner"]) == ("Running", "spark", "local")
    assert "20Gi to compact" in str(shown["engineReason"])
    assert "alone below 128Gi" in str(shown["engineReason"])
    assert world.compactions == {}


def test_an_automatic_run_of_a_huge_topic_gets_executors(world: World) -> None:
    world.topic_bytes = 1 << 40
    world.force("now", "quotes")
    go(world, 3)
    assert status(world, "now")["runner"] == "job"


def test_an_automatic_run_is_the_brokers_where_there_is_no_spark(world: World) -> None:
    world.topic_bytes = 1 << 40
    world.force("now", "quotes")
    go(world, 3, spark_image="")
    assert (status(world, "now")["engine"], status(world, "now")["engineReason"]) == (
        "broker",
        "there is no Spark here",
    )


def test_the_engine_of_a_run_stays_what_it_was_when_the_topic_grows(world: World) -> None:
    world.force("now", "quotes")
    go(world, 3)
    world.topic_bytes = 1 << 40
    go(world, 2)
    assert status(world, "now")["engine"] == "broker"
    assert world.all(JOB) == []


def test_a_run_of_spark_is_followed_by_its_plan_to_its_result(world: World) -> None:
    world.force("now", "quotes", engine="spark", spark={"runner": "job", "executors": 3})
    said = set()
    for _ in range(12):
        go(world, 1)
        said.add(world.condition(COMPACTION, "now", "Complete").get("message", ""))
    shown = status(world, "now")
    assert (shown["phase"], shown["engine"], shown["runner"], shown["progress"]) == (
        "Succeeded",
        "spark",
        "job",
        "1/1",
    )
    assert shown["partitions"] == [{
        "partition": 0, "state": "done", "recordsBefore": 10, "recordsAfter": 4, "seconds": 0.5, "tombstonesDropped": 1,
    }]  # fmt: skip
    head = "Spark compacts the topic (driver and executors)"
    assert {f"{head}: the driver begins", f"{head}: 1 of 2 slices of keys are read"} <= said
    assert {"CompactionStarted", "CompactionDone"} <= set(world.events())
    assert len(world.all(JOB)) == 1, "the driver's log is kept for a while"


def test_a_drivers_pods_may_do_what_their_runner_needs(world: World) -> None:
    world.force("alone", "quotes", engine="spark", spark={"runner": "local", "cores": 2, "memory": "3Gi"})
    go(world, 4)
    pod = driver(world)["spec"]["template"]["spec"]
    assert world.all(ROLE_BINDING)[0]["metadata"]["name"] == "main-0"
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("firn-driver-quotes", False)
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "3072Mi"}
    assert pod["containers"][0]["args"][-1] == "local[2,8]", "a worker that is killed is no end of the run"
    assert [name_of(each) for each in world.all(SERVICE_ACCOUNT)] == ["firn-driver-quotes", "main-0"]


def test_the_accounts_of_runs_are_the_topics_and_stay_as_they_are(world: World) -> None:
    world.force("now", "quotes", engine="spark", spark={"runner": "job"})
    go(world, 12)
    before = [each for each in world.all(SERVICE_ACCOUNT) if name_of(each).startswith("firn-")]
    assert [
        (each["ownerReferences"][0]["kind"], len(each["ownerReferences"]))
        for each in (account["metadata"] for account in before)
    ] == [
        ("CompactedTopic", 1),
        ("CompactedTopic", 1),
    ]
    world.force("later", "quotes", engine="spark", spark={"runner": "job"})
    go(world, 12)
    assert status(world, "later")["phase"] == "Succeeded"
    after = [each for each in world.all(SERVICE_ACCOUNT) if name_of(each).startswith("firn-")]
    assert after == before, "to hand them to another owner takes the right to delete them"


def test_a_run_that_spark_and_the_brokers_disagree_about_fails_with_the_offsets(world: World) -> None:
    world.bad_partition = "disagreement"
    world.force("now", "quotes", engine="spark")
    go(world, 12)
    assert status(world, "now")["phase"] == "Failed"
    condition = world.condition(COMPACTION, "now", "Complete")
    assert condition["reason"] == "Disagreement"
    assert "first at offsets 17, 23" in condition["message"]
    assert "CompactionFailed" in world.events()


def test_a_driver_that_is_given_up_fails_the_run_with_its_last_words(world: World) -> None:
    world.driver_says = "Unavailable: no broker answers"
    world.force("now", "quotes", engine="spark")
    go(world, 6)
    assert status(world, "now")["phase"] == "Failed"
    message = world.condition(COMPACTION, "now", "Complete")["message"]
    assert "BackoffLimitExceeded" in message
    assert message.endswith("it said: Unavailable: no broker answers")


def test_a_job_that_somebody_deleted_is_made_again_and_goes_on_with_its_plan(world: World) -> None:
    world.force("now", "quotes", engine="spark")
    go(world, 5)
    first = driver(world)["metadata"]["uid"]
    assert world.plans["quotes"]["state"] == "open"
    world.remove(JOB, name_of(driver(world)))
    go(world, 8)
    assert driver(world)["metadata"]["uid"] != first
    assert status(world, "now")["phase"] == "Succeeded"


def test_a_run_whose_plan_is_done_gets_no_second_driver(world: World) -> None:
    world.force("now", "quotes", engine="spark")
    go(world, 3)
    world.plans["quotes"] = {
        "id": "p", "run": (world.find(COMPACTION, "now") or {})["metadata"]["uid"], "state": "done",
        "partitions": [{"partition": 0, "state": "done"}],
    }  # fmt: skip
    for job in world.all(JOB):
        world.remove(JOB, name_of(job))
    go(world, 3)
    assert world.all(JOB) == []
    assert status(world, "now")["phase"] == "Succeeded"


def test_a_driver_that_ended_well_where_the_brokers_have_forgotten_its_plan_has_done_it(world: World) -> None:
    world.force("now", "quotes", engine="spark")
    go(world, 4)
    world.drivers_at_work = False
    world.plans.clear()
    world.change(
        JOB,
        name_of(driver(world)),
        lambda job: job.update(status={"conditions": [{"type": "Complete", "status": "True"}]}),
    )
    go(world, 2)
    assert status(world, "now")["phase"] == "Succeeded"


def test_the_plan_of_somebody_else_says_nothing_about_a_run(world: World) -> None:
    world.plans["quotes"] = {
        "id": "p",
        "run": "a person",
        "state": "done",
        "partitions": [{"partition": 0, "state": "done"}],
    }
    world.drivers_at_work = False
    world.force("now", "quotes", engine="spark")
    go(world, 6)
    assert status(world, "now")["phase"] == "Running"
    assert world.condition(COMPACTION, "now", "Complete")["message"].endswith("the driver begins")


def test_a_driver_that_cannot_begin_is_told_of(world: World) -> None:
    world.drivers_at_work = False
    world.force("now", "quotes", engine="spark")
    go(world, 4)
    job = driver(world)
    waiting = {
        "containerStatuses": [
            {"state": {"waiting": {"reason": "ErrImageNeverPull", "message": "no such image"}}}
        ]
    }
    meta = {"name": "p", "namespace": NAMESPACE, "labels": {"job-name": name_of(job)}}
    world.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": waiting})
    go(world, 2)
    assert "(ErrImageNeverPull no such image)" in world.condition(COMPACTION, "now", "Complete")["message"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"terminated": {"exitCode": 1, "message": "Trace\nImportError: no x\n"}}, "the last try ended: ImportError: no x"),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "the last try ended: exit code 137, OOMKilled"),
        ({"terminated": {"exitCode": 0}}, ""),
        ({"running": {}}, ""),
        ({"waiting": {"reason": "ContainerCreating"}}, "ContainerCreating"),
    ],
)  # fmt: skip
def test_what_keeps_a_driver_is_read_from_its_newest_pod(state: Obj, said: str) -> None:
    older = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "status": {}}
    newer = {
        "metadata": {"creationTimestamp": "2026-01-01T00:00:09Z"},
        "status": {"containerStatuses": [{"state": state}]},
    }
    assert parse_job({}, [newer, older]).trouble == said


def test_a_deleted_run_of_spark_takes_its_driver_and_its_plan_along(world: World) -> None:
    world.force("now", "quotes", engine="spark", spark={"runner": "job"})
    go(world, 4)
    assert world.plans["quotes"]["state"] == "open"
    world.end(COMPACTION, "now")
    go(world, 3)
    assert world.find(COMPACTION, "now") is None
    assert world.plans["quotes"]["state"] == "cancelled"
    assert world.all(JOB) == []
    own = [name_of(each) for kind in (CONFIG_MAP, ROLE_BINDING, POD) for each in world.all(kind)]
    assert [name for name in own if not name.startswith("main")] == []


def test_a_deleted_run_leaves_the_plan_of_another_one_alone(world: World) -> None:
    world.force("now", "quotes", engine="spark")
    go(world, 3)
    world.drivers_at_work = False
    world.plans["quotes"] = {"id": "p", "run": "a person", "state": "open", "partitions": []}
    world.end(COMPACTION, "now")
    go(world, 3)
    assert world.plans["quotes"]["state"] == "open"
    assert world.find(COMPACTION, "now") is None


def test_a_name_that_somebody_else_has_fails_the_run_and_is_left_alone(world: World) -> None:
    meta = {"name": "firn-driver-quotes", "namespace": NAMESPACE}
    world.put({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    world.force("now", "quotes", engine="spark")
    go(world, 5)
    assert (
        "ServiceAccount firn-driver-quotes is there and not the operator's"
        in (world.condition(COMPACTION, "now", "Complete")["message"])
    )
    assert world.all(JOB) == []


def next_look(world: World, name: str) -> float | None:
    """In how many seconds a run is looked at again without a cause."""

    async def look() -> float | None:
        operator = new_operator(world)
        await operator.sweep()
        return await operator.reconciler.work(Key("compaction", NAMESPACE, name))

    return asyncio.run(look())


def test_a_run_whose_objects_are_refused_says_so_and_goes_on_once_they_are_not(world: World) -> None:
    def refuse(request: Request) -> None:
        if request.is_write and request.kind == "Job":
            raise Forbidden("exceeded quota: few, requested: count/jobs.batch=1")

    world.on_request = refuse
    world.force("now", "quotes", engine="spark")
    go(world, 4)
    assert status(world, "now")["phase"] == "Running"
    assert "exceeded quota: few" in world.condition(COMPACTION, "now", "Complete")["message"]
    before = len(world.requests)
    go(world, 3)
    assert [(each.verb, each.kind) for each in world.writes(before)] == [("apply", "Job")] * 3
    assert next_look(world, "now") == WAIT_S
    world.on_request = lambda request: None
    go(world, 8)
    assert status(world, "now")["phase"] == "Succeeded"


def test_a_drained_node_costs_a_run_no_try_and_wrong_usage_is_not_tried_again(world: World) -> None:
    world.force("now", "quotes", engine="spark")
    go(world, 5)
    spec = driver(world)["spec"]
    drained, usage = spec["podFailurePolicy"]["rules"]
    assert (drained["action"], drained["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (usage["action"], usage["onExitCodes"]["values"]) == ("FailJob", [2])
    [container] = spec["template"]["spec"]["containers"]
    assert usage["onExitCodes"]["containerName"] == container["name"]
    assert (
        spec["template"]["spec"]["restartPolicy"] == "Never"
    )  # without which Kubernetes takes no such policy


def test_a_cluster_of_brokers_that_ask_for_nothing_gives_its_drivers_no_token(world: World) -> None:
    world.cluster("open", security={"insecure": True})
    world.topic("news", "open")
    go(world, 15)
    world.force("now", "news", engine="spark", spark={"runner": "job"})
    go(world, 4)
    pod = driver(world)["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["tmp", "spark"]
    assert {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}["FIRN_BROKER"] == (
        f"open-bootstrap.{NAMESPACE}.svc:7700"
    )
