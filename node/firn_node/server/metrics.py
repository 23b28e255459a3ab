"""``/metrics`` for Prometheus: the engine's counters, the broker's and its partitions' state, the server's own.

Everything is read at the moment of the scrape; nothing is kept here. A name of the engine's plain counters that
ends in ``_now`` or ``_seconds_now`` is a gauge, any other one counts up and is exposed as ``firn_<name>_total``.
Partitions are shown up to a bound: a broker may have a million.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from firn_node.security.decision import Action
from firn_node.server.context import Context
from firn_node.server.health import METRICS_TYPE
from firn_node.server.params import Call
from firn_node.server.routes import Route

_TOPICS_MAX = 200
_BROKER_GAUGES = ("epoch", "committed_position", "log_start", "log_end", "lag_bytes", "lag_seconds")
_PARTITION_GAUGES = (
    "earliest", "latest", "horizon", "live_records", "dirty_ratio", "raw_bytes", "compacted_bytes",
)  # fmt: skip


class BrokerCollector(Collector):
    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterable[Metric]:
        yield from self._engine()
        status = self._context.broker.status(limit=_TOPICS_MAX)
        yield from _broker_metrics(status["brokers"])
        yield from _partition_metrics(status["topics"])
        yield from self._server()

    def _engine(self) -> Iterator[Metric]:
        for name, value in sorted(self._context.broker.metrics.items()):
            if name.endswith("_now"):
                yield GaugeMetricFamily(f"firn_{name.removesuffix('_now')}", _words(name), value)
            else:
                yield CounterMetricFamily(f"firn_{name.removesuffix('_total')}", _words(name), value)

    def _server(self) -> Iterator[Metric]:
        context, counts = self._context, self._context.counts
        gauges = {
            "ready": ("Whether the broker takes writes.", int(context.broker.is_ready())),
            "insecure": (
                "1 when --insecure lets it listen on any address without TLS and authentication.",
                int(context.broker.settings.insecure),
            ),
            "server_connections": ("Open connections.", counts.connections),
            "server_streams": ("Open WebSocket streams.", len(context.streams)),
            "server_in_flight_bytes": (
                "Produce requests received and not yet answered.",
                context.in_flight.used,
            ),
            "server_in_flight_limit_bytes": ("Budget of these.", context.in_flight.limit),
            "server_in_flight_waiting": ("Produce requests that wait for room.", context.in_flight.waiting),
            "server_reads_bytes": ("Bulk reads in memory.", context.reads.used),
            "server_reads_limit_bytes": ("Budget of these.", context.reads.limit),
            "server_long_polls": ("Reads that wait for bytes.", len(context.waiting)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"firn_{name}", text, value)
        totals = {
            "server_connections_refused": ("Connections past connections_max.", counts.connections_refused),
            "server_failures": ("Unforeseen exceptions; each is a bug.", counts.failures),
            "server_received_bytes": ("Bytes of records received.", counts.bytes_in),
            "server_sent_bytes": ("Bytes of records sent.", counts.bytes_out),
            "server_sendfile_bytes": ("Those of them that went by sendfile.", counts.sendfile_bytes),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"firn_{name}", text, value)
        requests = CounterMetricFamily(
            "firn_server_requests", "HTTP requests.", labels=["method", "route", "status"]
        )
        for (method, route, code), value in counts.requests.items():
            requests.add_metric([method, route, str(code)], value)
        yield requests
        seconds = CounterMetricFamily(
            "firn_server_request_seconds", "Time spent in HTTP requests.", labels=["method", "route"]
        )
        for key, spent in counts.request_seconds.items():
            seconds.add_metric(list(key), spent)
        yield seconds
        yield from self._security()
        yield _labelled("firn_server_stream_messages", "Messages of streams.", "op", counts.stream_messages)
        yield _labelled("firn_server_stream_errors", "Errors told on streams.", "code", counts.stream_errors)

    def _security(self) -> Iterator[Metric]:
        door, guard = self._context.door, self._context.guard
        if door is not None and door.files is not None:
            text = "1 when changed certificates or tokens are no good and the old ones stay in force."
            yield GaugeMetricFamily("firn_security_problem", text, int(door.files.problem is not None))
            text = "Connections that have not proven anything yet."
            yield GaugeMetricFamily("firn_security_unproven", text, door.admission.unproven)
            text = "Connections cut because their address had too many of these."
            yield CounterMetricFamily("firn_security_unproven_refused", text, door.admission.refused)
            yield CounterMetricFamily(
                "firn_security_handshakes_failed",
                "TLS handshakes that came to nothing.",
                door.handshakes_failed,
            )
            text = "How often certificates and tokens were read again."
            yield CounterMetricFamily("firn_security_reloads", text, door.files.reloads)
        if guard is not None:
            yield _labelled("firn_security_denials", "Requests denied.", "code", guard.denials)
            failures = 0 if guard.audit is None else guard.audit.failures
            yield CounterMetricFamily(
                "firn_security_audit_failures", "Lines that the audit log could not take.", failures
            )


def _words(name: str) -> str:
    return f"Engine: {name.replace('_', ' ')}."


def _labelled(name: str, text: str, label: str, values: "Counter[str]") -> Metric:
    found = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        found.add_metric([key], value)
    return found


def _broker_metrics(brokers: list[dict[str, Any]]) -> Iterator[Metric]:
    for name in _BROKER_GAUGES:
        gauge = GaugeMetricFamily(f"firn_broker_{name}", f"Status: {name}.", labels=["node"])
        for row in brokers:
            if row.get(name) is not None:
                gauge.add_metric([row["node"]], row[name])
        yield gauge
    facts: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
        "read_only": ("1 when writes are refused.", lambda row: row["read_only"]),
        "is_master": ("1 when it is the master of its group.", lambda row: row["role"] == "master"),
        "in_sync": ("1 when it counts for what is acknowledged.", lambda row: row["in_sync"]),
    }
    for name, (text, holds) in facts.items():
        gauge = GaugeMetricFamily(f"firn_broker_{name}", text, labels=["node"])
        for row in brokers:
            gauge.add_metric([row["node"]], int(bool(holds(row))))
        yield gauge


def _partition_metrics(topics: list[dict[str, Any]]) -> Iterator[Metric]:
    rows = [(topic["name"], row) for topic in topics for row in topic["partitions"]]
    for name in _PARTITION_GAUGES:
        gauge = GaugeMetricFamily(f"firn_partition_{name}", f"Status: {name}.", labels=["topic", "partition"])
        for topic, row in rows:
            if row.get(name) is not None:
                gauge.add_metric([topic, str(row["partition"])], row[name])
        yield gauge


def metrics_text(context: Context) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BrokerCollector(context))
    return generate_latest(registry)


async def get_metrics(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    return web.Response(body=metrics_text(context), headers={"Content-Type": METRICS_TYPE})


ROUTES = [Route("GET", "/metrics", get_metrics, Action.ADMIN)]
