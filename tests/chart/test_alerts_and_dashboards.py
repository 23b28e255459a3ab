"""Alerts and dashboards ask for metrics that a broker really shows; every alert has its section in the runbooks."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from security_kit import Asking, Site, guarded

from firn_node.engine.broker import Broker
from firn_node.settings import BrokerSettings
from firn_operator.health import Metrics

ROOT = Path(__file__).resolve().parents[2]
ALERTS = [
    rule
    for group in yaml.safe_load((ROOT / "helm/files/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARDS = sorted((ROOT / "helm/files/dashboards").glob("*.json"))
METRIC = re.compile(r"\b(?:firn_(?!dev_)|kubelet_)[a-z_]+")
OF_KUBELET = {"kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"}


def of_the_operator() -> set[str]:
    families = list(Metrics().registry.collect())
    return {f"{f.name}_total" if f.type == "counter" else f.name for f in families}


def expressions() -> list[str]:
    found = [rule["expr"] for rule in ALERTS]
    for path in DASHBOARDS:
        document = json.loads(path.read_text())
        found += [target["expr"] for panel in document["panels"] for target in panel["targets"]]
        found += [str(variable["query"]) for variable in document["templating"]["list"]]
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], str]:
    """Names of all metrics of a broker with TLS that has a topic and has compacted it, and the text."""
    folder = tmp_path_factory.mktemp("broker")
    (folder / "pki").mkdir()
    site = Site(folder / "pki")

    async def main() -> str:
        broker = Broker(BrokerSettings(str(folder / "data"), index="files"))
        await broker.start()
        try:
            async with (
                guarded(site, broker) as server,
                Asking(server.address, site.client("a", is_admin=True)) as ask,
            ):
                await ask("POST", "/v1/topics", json={"name": "t", "spec": {"partitions": 1}})
                await ask("PUT", "/v1/topics/t/records/k", data=b"v")
                status, run = await ask("POST", "/v1/topics/t/compaction", json={"force": True})
                async with asyncio.timeout(60):
                    while run["state"] in ("waiting", "running"):
                        await asyncio.sleep(0.01)
                        status, run = await ask("GET", "/v1/topics/t/compaction")
                assert run["state"] == "done", run
                status, text = await ask("GET", "/metrics")
                assert status == 200
                return str(text.decode())
        finally:
            await broker.stop()

    text = asyncio.run(main())
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)), text


def test_every_metric_asked_for_is_shown_by_a_broker_or_the_operator(shown: tuple[set[str], str]) -> None:
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(asked) > 25
    assert asked - shown[0] - OF_KUBELET - of_the_operator() == set()


def test_counters_of_alerts_are_there_before_their_first_failure(shown: tuple[set[str], str]) -> None:
    for rule in ALERTS:
        for name in re.findall(r"increase\((firn_(?!operator_)[a-z_]+)", rule["expr"]):
            assert re.search(rf"^{name} \d", shown[1], re.MULTILINE), (
                f"{rule['alert']}: {name} has no sample yet"
            )


def test_a_broker_shows_that_it_is_master_and_in_sync(shown: tuple[set[str], str]) -> None:
    assert 'firn_broker_is_master{node="firn-0"} 1.0' in shown[1]
    assert 'firn_broker_in_sync{node="firn-0"} 1.0' in shown[1]
    assert 'firn_broker_read_only{node="firn-0"} 0.0' in shown[1]


def test_every_alert_has_a_runbook_section_and_every_section_an_alert() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in ALERTS]


def test_alerts_say_how_bad_how_long_and_what() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert set(rule) == {"alert", "expr", "for", "severity", "summary"}
        assert rule["severity"] in ("critical", "warning")
        labels = set(re.findall(r"\$labels\.(\w+)", rule["summary"]))
        kept = set(
            re.findall(r"by \(([^)]*)\)", rule["expr"])
            and ", ".join(re.findall(r"by \(([^)]*)\)", rule["expr"])).split(", ")
        )
        assert not kept or labels <= kept, f"{rule['alert']}: its expression drops {labels - kept}"
