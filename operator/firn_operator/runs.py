"""Passes over ForceCompactions: the decisions of ``compactions``, carried out.

Every step may be done twice, by two operators: a choice is kept in the status, objects of a run are named after it, a
plan and a compaction are the topic's, and a deleted run takes along what is its own alone.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Protocol

from firn.engines import bytes_to_compact
from firn.errors import Forbidden, Invalid, NotFound
from firn_operator import steps as planned
from firn_operator.actions import Outcome
from firn_operator.brokers import Brokers, Way, way_to
from firn_operator.compactions import (
    ENDED,
    LOOK_S,
    TROUBLE_MAX,
    WAIT_S,
    JobState,
    Run,
    begun,
    beyond_history,
    choose,
    followed,
    followed_spark,
    needs_size,
    parse_job,
    parse_run,
    pending,
    waits_for,
    words_of,
)
from firn_operator.conditions import Condition
from firn_operator.events import Events
from firn_operator.kube import COMPACTION, JOB, KINDS, POD, TOPIC, Kind, Kube, Obj, name_of, namespace_of
from firn_operator.names import COMPACTION_FINALIZER, LABEL_MANAGED_BY, MANAGER
from firn_operator.observe import Cache, ClusterState
from firn_operator.same import is_applied
from firn_operator.sparkruns import SparkRun, run_base, run_objects
from firn_operator.spec import parse_topic
from firn_operator.steps import Finalize

STALE_AGAIN_S = 0.2
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class Passes(Protocol):
    """What these passes share with the others (``reconcile.Reconciler``)."""

    async def observe(self, namespace: str, name: str) -> ClusterState | None: ...
    async def say(self, kind: Kind, resource: Obj, status: Obj, conditions: list[Condition]) -> None: ...


Act = Callable[[list[planned.Action], str], Awaitable[Outcome]]


class Compactions:
    """``spark_image``: of drivers and executors; empty: there is no Spark."""

    def __init__(
        self, kube: Kube, brokers: Brokers, cache: Cache, events: Events, passes: Passes, act: Act, *, spark_image: str,
        now: Callable[[], datetime],
    ) -> None:  # fmt: skip
        self._kube = kube
        self._brokers = brokers
        self._cache = cache
        self._events = events
        self._passes = passes
        self._act = act
        self._image = spark_image
        self._now = now

    async def work(self, namespace: str, name: str) -> float | None:
        """One pass; seconds until the next one without a cause."""
        resource = self._cache.get(COMPACTION, namespace, name)
        if resource is None:
            return None
        run, now = parse_run(resource), self._now()
        if "deletionTimestamp" in resource["metadata"]:
            return await self._cancel(resource, run)
        if run.phase in ENDED:
            left = (run.ended or now) + run.ttl - now
            if left <= timedelta():
                await self._kube.delete(COMPACTION, namespace, name)
            return max(left.total_seconds(), 1.0)
        topic = self._cache.get(TOPIC, namespace, run.topic)
        others = [parse_run(each) for each in self._cache.all(COMPACTION, namespace)]
        if run.phase != "Running" and (why := waits_for(run, topic, others, has_spark=bool(self._image))):
            return await self._wait(resource, why)
        state = (
            await self._passes.observe(namespace, parse_topic(topic).cluster) if topic is not None else None
        )
        if state is None:
            return await self._wait(resource, f"the topic {run.topic} or its cluster is gone")
        if COMPACTION_FINALIZER not in (resource["metadata"].get("finalizers") or ()):
            await self._finalize(resource, add=True)
            return STALE_AGAIN_S
        if run.phase != "Running" or run.chosen is None:
            await self._begin(resource, run, state)
            return STALE_AGAIN_S
        if run.chosen == "spark":
            return await self._follow_spark(resource, run, state)
        await self._follow(resource, run, way_to(state))
        return LOOK_S

    async def _wait(self, resource: Obj, why: str) -> float:
        status, condition = pending(why)
        await self._passes.say(COMPACTION, resource, status, [condition])
        return WAIT_S

    def _time(self) -> str:
        return self._now().strftime(TIME_FORMAT)

    async def _begin(self, resource: Obj, run: Run, state: ClusterState) -> None:
        """Choose, and keep the choice. Errors: Unavailable when no broker tells how much there is to do."""
        size = None
        if needs_size(run):
            found = await self._brokers.describe(way_to(state), run.topic)
            size = bytes_to_compact(found.get("partitions") or ())
        choice = choose(run, size, has_spark=bool(self._image))
        status, condition = begun(choice, self._time())
        await self._passes.say(COMPACTION, resource, status, [condition])
        words = f"{words_of(choice.engine, choice.runner)}: {choice.why}"
        await self._events.post(resource, "CompactionStarted", words)

    async def _follow(self, resource: Obj, run: Run, way: Way) -> None:
        """Ask the brokers for a run of theirs, or look how far it is."""
        document = await self._brokers.compaction(way, run.topic) if "progress" in _status(resource) else None
        if document is None:
            document = await self._brokers.compact(way, run.topic)
        await self._tell(resource, *followed(run, document, self._time()))

    async def _follow_spark(self, resource: Obj, run: Run, state: ClusterState) -> float:
        """Begin a driver where there is none, and look how far its plan is; seconds until the next look."""
        namespace, base = namespace_of(resource), run_base(run.name, run.uid)
        job, told = await self._kube.get(JOB, namespace, base), JobState()
        if job is not None:
            pods = await self._kube.list(POD, namespace, selector=f"job-name={base}")
            told = parse_job(job, pods)
        # Behind the Job: of a driver that has ended the plan is final by now.
        plan = await self._brokers.plan(way_to(state), run.topic)
        has_ended = (
            plan is not None and plan.get("run") == run.uid and plan.get("state") in ("done", "cancelled")
        )
        again = LOOK_S
        if job is None and not has_ended:
            try:
                if taken := await self._make(run, state):
                    told = JobState(failure=taken)
            except (Invalid, Forbidden) as error:
                # A quota, a webhook, rights: what somebody mends while the run waits.
                told = JobState(trouble=f"its objects are refused: {error.message}"[:TROUBLE_MAX])
                again = WAIT_S
        await self._tell(resource, *followed_spark(run, plan, told, self._time()))
        return again

    async def _make(self, run: Run, state: ClusterState) -> str:
        """The objects of a run of Spark; a sentence when somebody else has one of their names."""
        topic = self._cache.get(TOPIC, state.spec.namespace, run.topic)
        if topic is None:
            return f"the topic {run.topic} is gone"
        spark = SparkRun(
            run.name, run.uid, run.topic, parse_topic(topic).id.uid, run.runner or "local", run.wish, self._image,
            state.spec,
        )  # fmt: skip
        for body in run_objects(spark):
            kind = KINDS[body["kind"]]
            there = await self._kube.get(kind, spark.namespace, name_of(body))
            if there is not None and (there["metadata"].get("labels") or {}).get(LABEL_MANAGED_BY) != MANAGER:
                return f"{kind.kind} {name_of(body)} is there and not the operator's; delete or rename it"
            if not is_applied(there, body):
                await self._kube.apply(kind, spark.namespace, body)
        return ""

    async def _tell(self, resource: Obj, status: Obj, condition: Condition) -> None:
        await self._passes.say(COMPACTION, resource, status, [condition])
        if status["phase"] == "Running":
            return
        reason = "CompactionDone" if condition.state else "CompactionFailed"
        await self._events.post(resource, reason, condition.message, is_warning=not condition.state)
        await self._keep_history(resource)

    async def _keep_history(self, resource: Obj) -> None:
        """Older runs of a schedule go when more have ended than the topic wants to keep."""
        namespace, run = namespace_of(resource), parse_run(resource)
        topic = self._cache.get(TOPIC, namespace, run.topic)
        if topic is None or not run.is_scheduled:
            return
        others = [parse_run(each) for each in self._cache.all(COMPACTION, namespace)]
        ended = [each for each in others if each.topic == run.topic]
        for name in beyond_history(ended, parse_topic(topic).forced.history_limit):
            await self._kube.delete(COMPACTION, namespace, name)

    # The end of a run that is deleted.

    async def _cancel(self, resource: Obj, run: Run) -> float | None:
        """What a deleted run began is stopped, where somebody can be asked; then it goes."""
        if COMPACTION_FINALIZER not in (resource["metadata"].get("finalizers") or ()):
            return None
        topic = self._cache.get(TOPIC, namespace_of(resource), run.topic)
        cluster = parse_topic(topic).cluster if topic is not None else ""
        state = await self._passes.observe(namespace_of(resource), cluster) if cluster else None
        if run.phase == "Running" and run.chosen == "spark":
            # The driver first: it would take a plan that was dropped for one that a new master has forgotten.
            await self._kube.delete(JOB, namespace_of(resource), run_base(run.name, run.uid))
        if run.phase == "Running" and state is not None and any(group.master for group in state.groups):
            try:
                await self._stop(run, way_to(state))
            except NotFound:
                pass  # it has ended, or its master has
        outcome = await self._finalize(resource, add=False)
        return STALE_AGAIN_S if outcome.is_stale else None

    async def _stop(self, run: Run, way: Way) -> None:
        if run.chosen != "spark":
            await self._brokers.cancel(way, run.topic)
            return
        plan = await self._brokers.plan(way, run.topic)
        if plan is not None and plan.get("run") == run.uid and plan.get("state") == "open":
            await self._brokers.cancel_plan(way, run.topic)

    async def _finalize(self, resource: Obj, *, add: bool) -> Outcome:
        others = [
            each for each in resource["metadata"].get("finalizers") or () if each != COMPACTION_FINALIZER
        ]
        wanted = (*others, COMPACTION_FINALIZER) if add else tuple(others)
        why = "a run that is deleted is cancelled first" if add else "nothing of the run is left"
        version = str(resource["metadata"]["resourceVersion"])
        return await self._act(
            [Finalize(COMPACTION, name_of(resource), wanted, version, why)], namespace_of(resource)
        )


def _status(resource: Obj) -> dict[str, Any]:
    return dict(resource.get("status") or {})
