"""Do configs/ and deploy/ fit the server that they start: flags, routes, times, folders, metrics?"""

import dataclasses
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime import engine_builder
from runtime.engine_builder import EngineOptions
from runtime.http_guard import Access
from runtime.http_status import StatusRoutes
from runtime.memory_plan import plan_memory
from runtime.metrics import ServerMetrics
from runtime.options import parse_options
from runtime.server_state import ServerState
from runtime.serving import DRAIN_LIMIT_S, _engine_options
from tests.server_process import REPOSITORY
from tests.shared import shared_path

CONFIGS = sorted((REPOSITORY / "configs").glob("*.toml"))
DEPLOY = REPOSITORY / "deploy"
GIB = 2**30


def options_of(path: Path) -> EngineOptions:
    """For as many devices of that memory; a tiny hybrid model stands for the real one."""
    devices, gib = map(int, re.match(r"# (\d+) x (\d+) GiB", path.read_text()).groups())
    options = parse_options(["--config", str(path)], "1", Path("cache"))
    assert (options.mesh_ranks, options.device_memory_bytes) == (devices, gib * GIB)
    model = shared_path("tiny_models/qwen3_5")
    return dataclasses.replace(_engine_options(options, model), max_model_tokens=1024)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_configuration_can_be_planned_on_its_machine(path: Path) -> None:
    """All but what the compiled programs need for themselves."""
    options = options_of(path)
    setup = engine_builder._set_up(options)
    needs = engine_builder._needs(setup, engine_builder._device_memory(options), temporary_bytes=GIB)
    assert needs.ranks == options.mesh_ranks and plan_memory(needs).n_pages > 1000
    assert path.name in (REPOSITORY / "configs" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_configurations_programs_fit_as_well(path: Path) -> None:
    assert engine_builder.plan_only(options_of(path)).n_pages > 1000


def command_lines() -> dict[str, list[str]]:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    started = compose["services"]["strata"]["command"]
    (container,) = stateful_set()["containers"]
    docker = {
        name: json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / name).read_text(), re.MULTILINE)[1])
        for name in ("Dockerfile.cpu", "Dockerfile.cuda")
    }
    unit = re.search(r"^ExecStart=(.*)$", (DEPLOY / "strata.service").read_text(), re.MULTILINE)[1]
    return {
        "compose": [
            *docker["Dockerfile.cpu"],
            *(re.sub(r"\$\{STRATA_KEY.*\}", "key", word) for word in started),
        ],
        "kubernetes": [*docker["Dockerfile.cuda"], *container["args"]],
        "systemd": unit.replace("/etc/strata/strata.toml", str(CONFIGS[0])).split(),
    }


@pytest.mark.parametrize("where", ["compose", "kubernetes", "systemd"])
def test_what_they_start_is_a_command_line_of_ours(where: str) -> None:
    program, *arguments = command_lines()[where]
    assert Path(program).name == "strata-serve"
    options = parse_options(arguments, "1", Path("cache"))
    assert options.log_format == "json" and not options.insecure
    assert where == "systemd" or (options.host, options.port, len(options.api_keys)) == ("0.0.0.0", 8000, 1)


def stateful_set() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (found,) = [document for document in documents if document["kind"] == "StatefulSet"]
    (service,) = [document for document in documents if document["kind"] == "Service"]
    assert service["spec"]["selector"] == found["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["serviceName"] == service["metadata"]["name"]
    return found["spec"]["template"]["spec"]


def open_paths() -> set[str]:
    state = ServerState(("m",), "1")
    metrics = ServerMetrics("m", "1", lambda: None, lambda: None)
    routes = StatusRoutes(state, metrics, 60).routes()
    return {path for _, path, _, access in routes if access is Access.OPEN}


def test_probes_ask_for_routes_that_need_no_key() -> None:
    (container,) = stateful_set()["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000}
    asked = {}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"] in open_paths() and probe["port"] in ports
        asked[kind] = probe["path"]
    assert asked["livenessProbe"] == "/health" and asked["readinessProbe"] == "/ready"
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        (probed,) = re.findall(r"http://127.0.0.1:8000(/\w+)", (DEPLOY / name).read_text())
        assert probed in open_paths()


def test_nobody_is_killed_while_draining() -> None:
    least_s = DRAIN_LIMIT_S + parse_options([], "1", Path("cache")).tiers.drain_s
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    unit = (DEPLOY / "strata.service").read_text()
    assert stateful_set()["terminationGracePeriodSeconds"] > least_s
    assert int(compose["services"]["strata"]["stop_grace_period"].removesuffix("s")) > least_s
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1]) > least_s


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_hold_all_that_is_installed(name: str) -> None:
    text = (DEPLOY / name).read_text()
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {entry.rstrip("*") for entry in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"serve.py", "pyproject.toml"} <= copied
    let_in = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().split() if line[0] == "!"}
    assert copied <= let_in and all((REPOSITORY / path).exists() for path in copied)


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "strata.json").read_text())
    documented = (REPOSITORY / "docs" / "metrics.md").read_text()
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 8
    for name in {name for query in queries for name in re.findall(r"strata_\w+", query)}:
        assert f"`{name.removesuffix('_bucket')}`" in documented, name
    sources = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {sources[0]["uid"]}


def test_the_compose_file_mounts_what_there_is() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_file(), source
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["strata:8000"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong_in_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "strata.service").read_text()
    unit = tmp_path / "strata.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert "strata.service" not in done.stderr, done.stderr
