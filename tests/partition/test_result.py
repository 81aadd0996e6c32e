from __future__ import annotations

import json

from bagpipe.cluster.network import Network
from bagpipe.partition.cost import Cluster
from bagpipe.partition.plan import make_plan
from tests.partition.graphs import graph, towers


def test_the_summary_is_json():
    plan = make_plan(towers(2, 2), Cluster(devices=4, network=Network(bandwidth_bytes_per_s=1e9, latency_s=1e-5)), 256)
    summary = json.loads(json.dumps(plan.summary()))
    assert summary["schedule"] == plan.partition.schedule
    assert summary["devices"] == sum(stage["replicas"] for stage in summary["stages"])
    assert summary["one_device_step_s"] / summary["step_s"] == summary["speedup"]
    assert summary["edges"] == [list(edge) for edge in plan.partition.graph.edges]
    assert [stage["stage"] for stage in summary["stages"]] == list(range(len(summary["stages"])))
    assert {other["name"] for other in summary["alternatives"]} >= {"data parallel", "chain, 1f1b"}
    assert summary["exact"] is True


def test_one_device_is_named():
    plan = make_plan(graph(["ab"], {"a": 1e-9, "b": 1e-9}), Cluster(devices=2, network=Network(latency_s=1.0)), 4)
    assert plan.summary()["one_device_wins"] is True
    assert plan.summary()["speedup"] == 1
