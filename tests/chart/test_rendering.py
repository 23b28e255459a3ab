"""The chart through Helm itself: golden renders, values that are refused, and what must hold in every render."""

from typing import Any

import chart_kit
import pytest
import yaml
from chart_kit import (
    CHART,
    EVERYTHING,
    GOLDEN,
    RENDERS,
    ROOT,
    objects,
    pod_specs,
    render,
    run,
    without_definitions,
)

pytestmark = pytest.mark.apiserver  # where Helm is


@pytest.mark.parametrize("name", RENDERS)
def test_the_render_is_the_golden_one(name: str) -> None:
    found = without_definitions(render(RENDERS[name]))
    assert found == (GOLDEN / f"{name}.yaml").read_text(), (
        "PYTHONPATH=tests/support python -m chart_kit writes them anew"
    )


def test_lint_finds_nothing() -> None:
    done = run("lint", "--strict", str(CHART), values=EVERYTHING)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


def test_definitions_are_those_of_crds_and_are_kept_at_uninstall() -> None:
    rendered = {
        o["metadata"]["name"]: o for o in objects(render({})) if o["kind"] == "CustomResourceDefinition"
    }
    for path in (ROOT / "crds").glob("*.yaml"):
        wanted = yaml.safe_load(path.read_text())
        found = rendered.pop(wanted["metadata"]["name"])
        assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert found == wanted
    assert rendered == {}


def test_the_test_of_a_release_asks_for_nothing_that_an_insecure_cluster_does_not_have() -> None:
    def volumes(values: dict[str, Any]) -> dict[str, set[str]]:
        [(_, spec)] = [(where, spec) for where, spec in pod_specs(render(values)) if where.startswith("Pod")]
        mounted = {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]}
        return {"there": {volume["name"] for volume in spec["volumes"]}, "mounted": mounted}

    secure = {"tmp", "ca", "token"}
    assert volumes({"cluster": {"create": True}}) == {"there": secure, "mounted": secure}
    insecure = {"cluster": {"create": True, "spec": {"security": {"insecure": True}}}}
    assert volumes(insecure) == {"there": secure - {"ca"}, "mounted": secure - {"ca"}}


def test_definitions_can_be_left_to_somebody_else() -> None:
    assert "CustomResourceDefinition" not in render({"crds": {"install": False}})


def test_alerts_link_to_a_runbook_where_somebody_says_that_it_is_published_and_nowhere_else() -> None:
    def links(**rules: Any) -> set[str]:
        text = render({"monitoring": {"rules": {"enabled": True, **rules}}})
        [made] = [item for item in objects(text) if item["kind"] == "PrometheusRule"]
        alerts = [rule for group in made["spec"]["groups"] for rule in group["rules"]]
        return {rule["annotations"].get("runbook_url", "").partition("#")[0] for rule in alerts}

    assert links() == {""}
    assert links(runbookBase="https://wiki.example/runbooks") == {"https://wiki.example/runbooks"}


def test_an_operator_without_an_image_of_spark_is_told_of_none() -> None:
    assert "FIRN_SPARK_IMAGE" in render({})
    assert "FIRN_SPARK_IMAGE" not in render({"image": {"spark": {"repository": ""}}})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 3}, "additional properties 'replicas' not allowed"),
    ({"operator": {"replicas": "two"}}, "at '/operator/replicas': got string, want integer"),
    ({"operator": {"replicas": 9}}, "at '/operator/replicas': maximum: got 9, want 5"),
    ({"operator": {"logLevel": "loud"}}, "at '/operator/logLevel': value must be one of 'DEBUG'"),
    ({"operator": {"namespaces": ["Shop"]}}, "at '/operator/namespaces/0': 'Shop' does not match pattern"),
    ({"operator": {"namespaces": ["a", "a"]}}, "at '/operator/namespaces': items at 0 and 1 are equal"),
    ({"image": {"node": {"repository": ""}}}, "at '/image/node/repository'"),
    ({"image": {"node": {"digest": "abc"}}}, "at '/image/node/digest': 'abc' does not match pattern"),
    ({"image": {"pullPolicy": "Sometimes"}}, "at '/image/pullPolicy': value must be one of"),
    ({"cluster": {"create": "yes"}}, "at '/cluster/create': got string, want boolean"),
    ({"cluster": {"name": "9main"}}, "at '/cluster/name': '9main' does not match pattern"),
    ({"cluster": {"name": "m" * 46}}, "at '/cluster/name'"),
    ({"topics": {"Flights": {}}}, "invalid propertyName 'Flights'"),
    ({"topics": {"flights": 4}}, "at '/topics/flights': got number, want"),
    ({"monitoring": {"podMonitor": {"interval": "often"}}}, "at '/monitoring/podMonitor/interval'"),
    ({"monitoring": {"rule": {}}}, "additional properties 'rule' not allowed"),
    (
        {"monitoring": {"rules": {"runbookBase": "docs/runbooks.md"}}},
        "'docs/runbooks.md' does not match pattern",
    ),
    (
        {"operator": {"namespaces": ["news"]}, "cluster": {"create": True}},
        "cluster and topics are made in the release's namespace shop, which is not among operator.namespaces (news)",
    ),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[str(values)[:60] for values, _ in BAD])
def test_bad_values_are_refused_with_their_place(values: dict[str, Any], message: str) -> None:
    done = run(
        "template",
        "firn",
        str(CHART),
        "--namespace",
        "shop",
        "--kube-version",
        chart_kit.KUBERNETES,
        values=values,
    )
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("name", RENDERS)
def test_every_pod_meets_the_restricted_standard_and_writes_to_its_tmp_alone(name: str) -> None:
    specs = pod_specs(render(RENDERS[name]))
    assert len(specs) >= 2
    for where, spec in specs:
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, where
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= {"emptyDir", "configMap", "projected"}, where
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, where
            assert own["readOnlyRootFilesystem"] is True, where
            assert own["capabilities"] == {"drop": ["ALL"]}, where
            assert container["resources"]["limits"]["memory"], where
            writable = [
                mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
            ]
            assert writable == ["/tmp"], where


def rules(text: str, kind: str) -> list[dict[str, Any]]:
    return [rule for item in objects(text) if item["kind"] == kind for rule in item["rules"]]


def test_nobody_may_exec_or_list_secrets_or_anything_at_all() -> None:
    for name in RENDERS:
        text = render(RENDERS[name])
        for rule in rules(text, "ClusterRole") + rules(text, "Role"):
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], rule
            assert not {"pods/exec", "pods/attach", "pods/portforward"} & set(rule["resources"]), rule
            if "secrets" in rule["resources"]:
                assert not {"list", "watch"} & set(rule["verbs"]), rule
            assert not {"escalate", "impersonate"} & set(rule["verbs"]), rule
            if "bind" in rule["verbs"]:
                assert rule["resourceNames"] == ["firn-broker", "firn-spark"], rule


def test_with_namespaces_what_is_namespaced_is_granted_there_alone() -> None:
    text = render(RENDERS["two-namespaces"])
    bound = {o["roleRef"]["name"] for o in objects(text) if o["kind"] == "ClusterRoleBinding"}
    assert "firn-spark" not in bound  # the operator binds it in the namespace of each run
    wide = [o for o in objects(text) if o["kind"] == "ClusterRole" and o["metadata"]["name"] != "firn-spark"]
    everywhere = {resource for role in wide for rule in role["rules"] for resource in rule["resources"]}
    assert everywhere <= {"nodes", "persistentvolumes", "tokenreviews", "clusterrolebindings", "clusterroles"}
    roles = [o for o in objects(text) if o["kind"] == "Role" and o["metadata"]["name"] == "firn-operator"]
    assert [role["metadata"]["namespace"] for role in roles] == ["shop", "news"]
    assert roles[0]["rules"] == roles[1]["rules"]
    granted = sum(len(rule["verbs"]) * len(rule["resources"]) for rule in rules(render({}), "ClusterRole"))
    own = sum(
        len(r["verbs"]) * len(r["resources"]) for r in [*rules(text, "ClusterRole"), *roles[0]["rules"]]
    )
    assert own == granted, "a right got lost, or doubled, between the two ways"
