"""The dashboard for Grafana and the rules for alerts: each metric that they name is one that multiq exports."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser as promql
import pytest
import yaml
from doc_blocks import blocks_of
from processes import until, worker
from prometheus_client.parser import text_string_to_metric_families
from test_cli_metrics import ask as ask_exporter
from test_cli_metrics import exporter
from test_worker_http import ask, port_of
from worker_app import app, quick

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((FOLDER / "prometheus-rules.yml").read_text())
PAGE = (ROOT / "docs" / "monitoring.md").read_text()

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
#: Grafana's variables, each with a value that it may have
VARIABLES = {"$__rate_interval": "5m", "$queue": ".*", "$task": ".*"}
#: the labels that Prometheus adds to those of multiq
ADDED = {"instance", "job"}


def expressions() -> Iterator[tuple[str, str]]:
    """The place and the text of each expression."""
    for panel in PANELS:
        for target in panel["targets"]:
            text = target["expr"]
            for variable, value in VARIABLES.items():
                text = text.replace(variable, value)
            yield f"{panel['title']} {target['refId']}", text
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]
    for block in blocks_of(ROOT / "docs" / "deploying.md"):
        for document in yaml.safe_load_all(block.code) if block.language == "yaml" else ():
            for number, trigger in enumerate(document["spec"].get("triggers", ())):
                yield f"KEDA {number}", trigger["metadata"]["query"]


EXPRESSIONS = dict(expressions())


def parts(text: str) -> list[Any]:
    """All nodes of an expression. Raises if the expression is not valid."""
    found: list[Any] = []
    promql.walk(promql.parse(text), pre_visit=found.append)
    return found


def manifests() -> dict[str, Any]:
    """The manifests for Kubernetes in the documentation, by their kind."""
    return {
        document["kind"]: document["spec"]
        for block in blocks_of(ROOT / "docs" / "deploying.md")
        if block.language == "yaml"
        for document in yaml.safe_load_all(block.code)
    }


def test_empty_queues_and_missing_metrics_do_not_mislead_keda() -> None:
    # given the queues in the queries of KEDA, then the page of the exporter always has them: a query without a result
    # is an error, and KEDA would keep its fallback while the queues are empty
    (container,) = manifests()["Deployment"]["template"]["spec"]["containers"]
    for trigger in manifests()["ScaledObject"]["triggers"]:
        found = re.search(r'queue=~"([^"]+)"', trigger["metadata"]["query"])
        assert found is not None
        assert set(found[1].split("|")) <= set(container["command"])
    # and an error removes no pods
    assert manifests()["ScaledObject"]["fallback"]["behavior"] == "currentReplicasIfHigher"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names of the samples, each with its labels, that a worker and ``multiq metrics`` export in a real run."""
    folder = tmp_path_factory.mktemp("run")
    app.connect(f"sqlite:///{folder}/jobs.db")
    with worker(folder, app.url, "processes=1, http=':0'") as process, exporter(folder, app.url) as (_, port, _log):
        quick.enqueue(1)
        until(lambda: b'multiq_jobs_total{outcome="done",task="quick"} 1.0' in ask(port_of(process), "/metrics")[1])
        until(lambda: b"multiq_backend_answered_seconds" in ask(port_of(process), "/metrics")[1])
        quick.options(queue="elsewhere").enqueue(1)
        until(lambda: "elsewhere" in ask_exporter(port))
        pages = [ask(port_of(process), "/metrics")[1].decode(), ask_exporter(port)]
    app.close()
    found: dict[str, set[str]] = {}
    for family in itertools.chain(*map(text_string_to_metric_families, pages)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_each_expression_names_metrics_and_labels_that_are_exported(place: str, exported: dict[str, set[str]]) -> None:
    nodes = parts(EXPRESSIONS[place])
    selectors = [node.vector_selector if isinstance(node, promql.MatrixSelector) else node for node in nodes]
    selectors = [node for node in selectors if isinstance(node, promql.VectorSelector)]
    assert selectors
    for selector in selectors:
        assert selector.name is not None
        assert selector.name in exported, f"{selector.name} is not exported"
        assert {matcher.name for matcher in selector.matchers.matchers} <= exported[selector.name]
    labels = set[str]().union(*(exported[str(selector.name)] for selector in selectors))
    used = {
        label
        for node in nodes
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None
        for label in node.modifier.labels
    }
    assert used <= labels | ADDED, f"no metric in it has the labels {used - labels}"


def test_a_wrong_name_or_label_would_be_found(exported: dict[str, set[str]]) -> None:
    assert "multiq_queue_jobs" in exported
    assert "multiq_queue_job" not in exported
    assert exported["multiq_queue_jobs"] == {"queue", "state"}
    with pytest.raises(ValueError, match="parenthesis"):
        parts("sum by (queue (multiq_queue_jobs)")


def test_the_dashboard_has_the_structure_that_grafana_imports() -> None:
    assert DASHBOARD["id"] is None  # Grafana gives it one
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"] == "multiq"
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$(?:\{(\w+)\}|(\w+))", text))
    assert {name or other for name, other in used} - {"__rate_interval", "__all"} == set(variables)


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} covers another panel"
        taken |= cells


@pytest.mark.parametrize("name", ["queue", "task"])
def test_a_variable_of_the_dashboard_lists_an_exported_label(name: str, exported: dict[str, set[str]]) -> None:
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == name]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert found is not None
    assert found[2] in exported[found[1]]


def test_each_alert_has_what_prometheus_needs_and_is_described_on_the_page() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names)
    for rule in ALERTS:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        by = {label for node in parts(rule["expr"]) if isinstance(node, promql.AggregateExpr) and node.modifier
              for label in node.modifier.labels}  # fmt: skip
        assert labels <= (by or ADDED)
    assert re.findall(r"^\| `(Multiq\w+)` \|", PAGE, re.MULTILINE) == names


def test_every_metric_is_in_the_documentation(exported: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name in exported:
        family = re.sub(r"_(bucket|count|sum)$", "", name)
        assert f"`{family}`" in text, f"{family} is not described in docs/metrics.md"
