"""The Grafana dashboard asks for metrics that the exporter has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from tests.trainer.observe.small import interval
from trainer.observe.events import Event
from trainer.observe.exporter import Exporter

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "trainer.json"

#: Functions, keywords and labels of PromQL expressions.
_WORDS = {"sum", "max", "avg", "rate", "by", "lane", "op", "table", "label_values", "job"}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels of every metric of a trainer, by name."""
    exporter = Exporter("127.0.0.1", 0, every_s=0.5)
    try:
        lanes = {"net-in": {"busy_s": 1.5, "waits_s": {"0X_READ": 0.25}}}
        exporter.take(interval(lanes=lanes))
        exporter.take(Event(kind="evaluation", elapsed_s=4, step=3, values={"auc@click": 0.75}))
        registry = CollectorRegistry()
        families = [*exporter.collect(), *ProcessCollector(registry=registry).collect()]
    finally:
        exporter.close(failed=False)
    return {sample.name: {*sample.labels, "job", "instance"} for family in families for sample in family.samples}


def board() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return value


def test_every_metric_that_a_panel_asks_for_exists(labels: dict[str, set[str]]) -> None:
    board_ = board()
    queries = [target["expr"] for panel in board_["panels"] for target in panel["targets"]]
    queries += [item["query"]["query"] for item in board_["templating"]["list"] if item["type"] == "query"]
    assert len(queries) > 15
    for query in queries:
        names = set(re.findall(r"[a-z]\w+", re.sub(r"\{.*?\}|\[.*?\]", "", query))) - _WORDS
        assert names, query
        assert names <= labels.keys(), query


def test_every_label_that_a_panel_names_exists(labels: dict[str, set[str]]) -> None:
    for panel in board()["panels"]:
        for target in panel["targets"]:
            (first, *_) = re.findall(r"(?:bagpipe_trainer|process)_\w+", target["expr"])
            used = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]), *re.findall(r"(\w+)=", target["expr"])}
            assert used <= labels[first], panel["title"]


def test_every_metric_of_a_trainer_is_on_the_dashboard(labels: dict[str, set[str]]) -> None:
    """But the rate, which the counter of examples tells."""
    text = DASHBOARD.read_text()
    ours = {name for name in labels if name.startswith("bagpipe_trainer_")}
    assert {name for name in ours if name not in text} == {"bagpipe_trainer_samples_per_second"}


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in board()["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
