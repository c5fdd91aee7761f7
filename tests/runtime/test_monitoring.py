"""Do the dashboard and the alert rules ask for metrics that a real server has, with labels and values that occur?"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.http_client import Client
from tests.server_process import REPOSITORY

FOLDER = REPOSITORY / "docs" / "monitoring"
DASHBOARD, ALERTS = FOLDER / "grafana-dashboard.json", FOLDER / "prometheus-alerts.yml"
# Labels that Prometheus itself adds to every sample.
FROM_PROMETHEUS = {"instance", "job"}


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL)."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.fixture(scope="module")
def samples(server: Client) -> dict[str, list[dict[str, str]]]:
    """The labels of every sample of a server that has answered, by the sample's name."""
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(server.request("GET", "/metrics")[2].decode()):
        found.setdefault(family.name, [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_every_metric_and_label_is_there(samples: Any, where: str, query: str) -> None:
    names = re.findall(r"\bstrata_\w+", query)
    assert names
    for name in names:
        assert name in samples or f"{name}_total" in samples, f"{where}: there is no {name}"
    for name, selector in re.findall(r"\b(strata_\w+)\{([^}]*)\}", query):
        for label, operator, wanted in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector):
            if label in FROM_PROMETHEUS:
                continue
            values = {labels.get(label) for labels in samples[name]}
            for value in wanted.split("|") if operator == "=~" else [wanted]:
                assert value in values, f"{where}: {name} {value}"
    labels = {label for name in names for found in samples.get(name, ()) for label in found}
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        assert set(group.replace(" ", "").split(",")) - FROM_PROMETHEUS <= labels, where


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) and dashboard["uid"] and dashboard["schemaVersion"] >= 39
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(x, place["y"]) for x in range(place["x"], place["x"] + place["w"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells


def test_alerts_have_all_that_a_person_needs() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert "$labels.instance" in rule["annotations"]["summary"]


def promtool(*arguments: str, text: str = "") -> str:
    """What it says of a file, or of `text`; it must have nothing against it."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, check=False, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_rules() -> None:
    assert "SUCCESS: 12 rules" in promtool("check", "rules", str(ALERTS))


def test_promtool_takes_what_a_running_server_says(server: Client) -> None:
    promtool("check", "metrics", text=server.request("GET", "/metrics")[2].decode())
