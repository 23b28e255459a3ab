"""The operator's own port: is it alive, has it read everything, what has it done.

``/livez`` is 503 when pieces of the process have stopped: the leader's loop does not turn, or one pass has been going on
for far longer than its requests may take. ``/readyz`` is 200 when this operator leads and has listed everything once, and
also when another one leads: that one is ready then. ``/metrics`` is Prometheus text.
"""

import asyncio
from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

STUCK_S = 300.0  # ten times what a request may take
TICK_S = 60.0


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"firn_operator_{name}", meaning, registry=self.registry)

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"firn_operator_{name}", meaning, labels, registry=self.registry)

        self.leading = gauge("leading", "1 while this operator leads")
        self.queue = gauge("queue_keys", "Keys that wait or are worked on")
        self.objects = gauge("cached_objects", "Objects in the cache")
        self.passes = counter(
            "passes", "Passes, by what they were about and how they ended", "what", "outcome"
        )
        self.requests = gauge("api_requests", "Requests to the API server since the start")
        self.events = gauge("watch_events", "Objects that watches and sweeps have shown since the start")
        self.degraded = Gauge(
            "firn_operator_degraded", "1 for each cluster that needs a person, by the reason of its condition Degraded",
            ("cluster_namespace", "cluster", "reason"), registry=self.registry,
        )  # fmt: skip

    def show_degraded(self, clusters: Iterable[tuple[str, str, str]]) -> None:
        """Namespaces, names and reasons of the clusters that are degraded now."""
        self.degraded.clear()
        for each in clusters:
            self.degraded.labels(*each).set(1)


class Health:
    """State that the process keeps up to date, and the answers made of it."""

    def __init__(self, metrics: Metrics, refresh: Callable[[], None]) -> None:
        self.metrics = metrics
        self._refresh = refresh
        self.is_listed = False
        self.is_leading: Callable[[], bool] = lambda: False
        self.since_tick_s: Callable[[], float] = lambda: 0.0
        self.oldest_running_s: Callable[[], float] = lambda: 0.0

    def trouble(self) -> str:
        """What has stopped; empty: nothing."""
        if self.since_tick_s() > TICK_S:
            return f"the leader's loop has not turned for {self.since_tick_s():.0f} s\n"
        if self.oldest_running_s() > STUCK_S:
            return f"a pass has been going on for {self.oldest_running_s():.0f} s\n"
        return ""

    async def live(self, _: web.Request) -> web.Response:
        trouble = self.trouble()
        return web.Response(status=503 if trouble else 200, text=trouble or "ok\n")

    async def ready(self, _: web.Request) -> web.Response:
        if self.is_leading() and not self.is_listed:
            return web.Response(status=503, text="reading what is there\n")
        return web.Response(text="leading\n" if self.is_leading() else "another operator leads\n")

    async def show(self, _: web.Request) -> web.Response:
        self._refresh()
        return web.Response(
            body=generate_latest(self.metrics.registry), content_type="text/plain", charset="utf-8"
        )


async def serve(health: Health, port: int, host: str = "0.0.0.0") -> web.AppRunner:
    """The port, open on return. Errors: OSError when it is taken."""
    app = web.Application()
    app.router.add_get("/livez", health.live)
    app.router.add_get("/readyz", health.ready)
    app.router.add_get("/metrics", health.show)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await asyncio.sleep(0)
    return runner
