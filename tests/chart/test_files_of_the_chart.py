"""What the chart brings is what the repository has: definitions and rights are copies, and Helm is not needed to see it."""

import json
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"


def test_the_charts_resource_definitions_are_those_of_crds() -> None:
    ours = {path.name: path.read_bytes() for path in (ROOT / "crds").glob("*.yaml")}
    assert len(ours) == 4
    assert {path.name: path.read_bytes() for path in (CHART / "files/crds").glob("*.yaml")} == ours, (
        "run `make chart`"
    )


def test_a_definition_has_one_metadata_line_where_the_chart_puts_its_annotation() -> None:
    for path in (CHART / "files/crds").glob("*.yaml"):
        text = path.read_text()
        assert text.splitlines().count("metadata:") == 1, path.name
        assert "annotations" not in yaml.safe_load(text)["metadata"], path.name


def test_every_value_has_its_place_in_the_schema_and_the_other_way_round() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(values: object, at: dict[str, object], where: str) -> None:
        properties = at.get("properties")
        if "$ref" in at:
            properties = schema["definitions"][str(at["$ref"]).rpartition("/")[2]].get("properties")
        if not isinstance(properties, dict) or not isinstance(values, dict) or not values:
            return
        known = set(properties) - ({"global"} if where == "" else set())
        assert set(values) == known or where == ".operator.resources", where
        for name, value in values.items():
            check(value, properties[name], f"{where}.{name}")

    check(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_the_chart_has_the_version_of_the_package() -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
