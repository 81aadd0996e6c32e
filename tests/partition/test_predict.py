from __future__ import annotations

import pytest

from bagpipe.cluster.network import Network
from bagpipe.errors import ScheduleError
from bagpipe.partition.cost import Cluster, CostModel, Placed
from bagpipe.partition.predict import cover, edge_bytes, micro_seconds, predict, stage_graph
from bagpipe.schedule.analysis.cover import check_cover
from tests.partition.graphs import graph, towers

FREE = Cluster(devices=8)


def each(model: CostModel, count: int) -> tuple[Placed, ...]:
    """A layout with one stage per operator."""
    return tuple(Placed(1 << n, 1, count) for n in model.graph.order)


def test_a_chain_takes_m_plus_p_minus_1_times_a_stage():
    model = CostModel(graph(["ab", "bc", "cd"]), FREE, 8)
    done = predict(model, each(model, 8))
    assert done.step_s == pytest.approx(8 + 4 - 1)  # every stage takes 1 second per example, micro-batches are of 1
    assert done.bubble == pytest.approx(3 / 8)
    assert done.in_flight == (4, 3, 2, 1)


@pytest.mark.parametrize("schedule", ["graph", "1f1b", "gpipe"])
def test_branches_shorten_the_pipeline_only_where_the_schedule_knows_them(schedule: str):
    """GraphPipe's published strategies: four stages side by side, then two more."""
    model = CostModel(graph(["ae", "be", "ce", "de", "ef"], dict.fromkeys("abcdef", 3.0)), FREE, 6)
    step_s = predict(model, each(model, 6), schedule).step_s
    assert step_s == pytest.approx(24 if schedule != "1f1b" else step_s)
    relayed = predict(model, each(model, 6), schedule if schedule != "graph" else "1f1b", relay=True)
    assert relayed.step_s == pytest.approx(33)


def test_links_delay_and_replicas_share():
    model = CostModel(
        graph(["ab"], output_bytes=6, param_bytes=3),
        Cluster(devices=4, network=Network(bandwidth_bytes_per_s=3.0, latency_s=0.5)),
        4,
    )
    # one micro-batch of 4 examples: forward 4/3 each, backward 8/3 each, twice 0.5 + 4 * 6 / 3
    assert predict(model, (Placed(1, 1, 1), Placed(2, 1, 1))).step_s == pytest.approx(8 + 2 * 8.5)
    # two replicas: half the time, half the bytes per link; and the first stage's ring, 2 * 1/2 * 3/3 + 2 * 0.5
    assert predict(model, (Placed(1, 2, 1), Placed(2, 2, 1))).step_s == pytest.approx(4 + 2 * 4.5 + 2)


def test_micro_batches_may_differ():
    model = CostModel(graph(["ab", "bc"]), FREE, 16)
    layout = (Placed(1, 1, 16), Placed(2, 1, 8), Placed(4, 1, 4))
    done = predict(model, layout)
    assert [live * 16 // s.microbatches for live, s in zip(done.in_flight, layout, strict=True)] == [10, 8, 4]
    with pytest.raises(ScheduleError, match="one number of micro-batches"):
        predict(model, layout, "1f1b")


def test_memory_is_that_of_the_schedule():
    line = graph(["ab"], activation_bytes=1)
    model = CostModel(line, Cluster(devices=2, memory_bytes=4), 16)
    assert predict(model, each(model, 8)).fits
    assert not predict(model, each(model, 8), "gpipe").fits


def test_edges_hold_each_tensor_once():
    fork = graph(["ab", "ac", "ad", "bd", "cd"], output_bytes=5)
    model = CostModel(fork, FREE, 4)
    layout = (Placed(0b0001, 1, 1), Placed(0b0110, 1, 1), Placed(0b1000, 1, 1))
    assert edge_bytes(model, layout) == {(0, 1): 5, (0, 2): 5, (1, 2): 10}
    assert edge_bytes(model, layout, relay=True) == {(0, 1): 5, (1, 2): 15}


def test_the_stage_graph_names_its_stages():
    model = CostModel(towers(2, 2), FREE, 64)
    masks = [0b0011, 0b1100, 0b110000]
    stages = stage_graph(model, [Placed(mask, 1, 8) for mask in masks])
    assert stages.edges == ((0, 2), (1, 2))
    assert stages.names == ("0.0 +1", "1.0 +1", "concat +1")
    assert stages.microbatches == 8
    relayed = stage_graph(model, [Placed(mask, 1, 8) for mask in masks], relay=True)
    assert relayed.edges == ((0, 1), (1, 2))


def test_seconds_of_a_micro_batch():
    model = CostModel(towers(2, 2), FREE, 64)
    forward, backward = micro_seconds(model, Placed(0b0011, 2, 4), (0, 1))
    assert forward == pytest.approx(2 * (3e-5 + 8 * 4e-6))
    assert backward == pytest.approx(2 * forward)


def test_the_slowest_replica_takes_the_time_of_a_stage():
    cluster = Cluster(devices=4, speeds=(1.0, 0.5, 2.0, 2.0))
    model = CostModel(towers(2, 2), cluster, 64)
    stage = Placed(0b0011, 2, 4)
    assert micro_seconds(model, stage, (0, 1))[0] == pytest.approx(4 * (3e-5 + 8 * 4e-6))
    assert micro_seconds(model, stage, (2, 3))[0] == pytest.approx(3e-5 + 8 * 4e-6)


def test_stages_of_one_host_use_its_links():
    """Ranks 0 and 1 are on one host, 2 on another: the first edge takes no time, the second 2 s and its bytes."""
    line = graph(["ab", "bc"], output_bytes=6)
    network = Network(bandwidth_bytes_per_s=3.0, latency_s=2.0, local_latency_s=0.0, hosts={0: 0, 1: 0})
    model = CostModel(line, Cluster(devices=3, network=network), 1)
    layout = tuple(Placed(1 << number, 1, 1) for number in range(3))
    assert predict(model, layout).step_s == pytest.approx(3 * 1.0 + 2 * (2.0 + 6 / 3.0))


def test_an_invalid_layout_is_detected():
    model = CostModel(graph(["ab", "bc"]), Cluster(devices=4), 8)
    check_cover(cover(model, (Placed(0b011, 2, 1), Placed(0b100, 1, 1))))
    with pytest.raises(ScheduleError, match="partition: operator 1 is in no stage"):
        check_cover(cover(model, (Placed(0b001, 1, 1), Placed(0b100, 1, 1))))
    with pytest.raises(ScheduleError, match="edges: operator 1 feeds 2, but there is no edge 1-0"):
        check_cover(cover(model, (Placed(0b100, 1, 1), Placed(0b011, 1, 1))))
    with pytest.raises(ScheduleError, match="convex: stage 0"):
        check_cover(cover(model, (Placed(0b101, 1, 1), Placed(0b010, 1, 1))))
