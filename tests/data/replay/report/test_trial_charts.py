"""Trials: step times side by side, the Gantt chart of a step."""

from __future__ import annotations

import dataclasses

import pytest

from data.replay.report.trial_charts import exposed_share, labels_of, trial_charts
from tests.data.replay.report.samples import FULL, STEP, trial


def test_the_fastest_step_is_on_top():
    times = trial_charts(FULL.trials)[0].figures[()]
    means, waits, medians = times["data"]
    assert medians["x"] == means["x"] == pytest.approx([41.2, 10.1, 9.3])  # drawn upwards
    assert waits["x"] == pytest.approx([4.6 / 150 * 1e3, 0.14 / 150 * 1e3, 0.02 / 150 * 1e3])


def test_exposed_share_is_of_the_runs_time():
    assert exposed_share(trial("drop-unused", 1, step_s=0.01, exposed_s=0.75)) == pytest.approx(0.5)
    assert exposed_share(dataclasses.replace(FULL.trials[0], samples_per_s=None)) is None


def test_a_slow_start_is_in_the_mean():
    slow = dataclasses.replace(FULL.trials[0], step_s_p50=0.01, samples_per_s=512 / 0.05)
    means, _, medians = trial_charts([slow])[0].figures[()]["data"]
    assert (means["x"], medians["x"]) == ([pytest.approx(50)], [pytest.approx(10)])


def test_labels_say_what_differs():
    trials = FULL.trials
    assert labels_of(trials)[1:] == ("drop-unused, lookahead 32, cache 20,000", "direct, no cache")
    larger = dataclasses.replace(trials[0], batch_size=1024, world_size=2)
    assert labels_of([trials[2], larger])[1] == "belady-window, lookahead 32, cache 20,000, batch 1,024, ranks 2"


def test_lanes_keep_their_order_and_kinds_share_a_colour():
    chart = trial_charts(FULL.trials)[1]
    assert chart.choices[0].options == labels_of(FULL.trials[:2])
    figure = chart.figures[(0,)]
    assert figure["layout"]["yaxis"]["ticktext"] == ["read", "net-in", "copy", "compute", "net-out"]
    assert [trace["name"] for trace in figure["data"]] == ["READ", "FETCH", "INSERT", "F", "B", "UPDATE", "STORE"]
    backward = figure["data"][4]
    assert (backward["y"], backward["base"], backward["x"]) == ([3], [3.0], [pytest.approx(5.0)])
    assert len(STEP) == sum(len(trace["y"]) for trace in figure["data"])


def test_a_kind_has_one_colour_in_all_trials():
    later = dataclasses.replace(FULL.trials[1], step=STEP[:2:-1])
    first, second = (figure["data"] for figure in trial_charts([FULL.trials[0], later])[1].figures.values())
    colours = {trace["name"]: trace["marker"] for trace in first}
    assert [trace["name"] for trace in second] == ["STORE", "UPDATE", "B", "F"]
    assert all(trace["marker"] == colours[trace["name"]] for trace in second)


def test_failed_trials_have_no_bar():
    broken = dataclasses.replace(FULL.trials[0], step_s_p50=None, step=(), error="no store")
    assert trial_charts([broken]) == []
