"""Charts of the training trials: step times side by side, and one step as a Gantt chart by lane."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bagpipe.report.charts import INK, Chart, Choice, Figure, Json, finite, plain, value_axis
from data.replay.records import Span, Trial

__all__ = ["exposed_share", "labels_of", "mean_step_s", "trial_charts"]

_STEP_COLOR, _EXPOSED_COLOR = "#56b4e9", "#d55e00"
_KIND_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#b8a200")
#: Once the colours are used up.
_KIND_PATTERNS = ("", "/", ".")


def trial_charts(trials: Sequence[Trial]) -> list[Chart]:
    """The charts for which the trials have data."""
    charts = []
    timed = [trial for trial in trials if trial.step_s_p50 is not None]
    if timed:
        charts.append(_step_times(timed))
    traced = [trial for trial in trials if trial.step]
    if traced:
        charts.append(_gantt(traced))
    return charts


def labels_of(trials: Sequence[Trial]) -> tuple[str, ...]:
    """A short label per trial, without the fields that all trials share; a cache of 0 rows is direct mode."""
    several_batches = len({trial.batch_size for trial in trials}) > 1
    several_ranks = len({trial.world_size for trial in trials}) > 1
    labels = []
    for trial in trials:
        cached = [trial.policy, f"lookahead {trial.lookahead:,}", f"cache {trial.cache_rows:,}"]
        parts = cached if trial.cache_rows else ["direct, no cache"]
        parts += [f"batch {trial.batch_size:,}"] * several_batches + [f"ranks {trial.world_size}"] * several_ranks
        labels.append(", ".join(parts))
    return tuple(labels)


def exposed_share(trial: Trial) -> float | None:
    """Share of the run's wall time in which computation waited for rows."""
    if trial.exposed_embedding_s is None or not trial.samples_per_s or not trial.steps:
        return None
    return finite(trial.exposed_embedding_s / trial.steps * trial.samples_per_s / trial.batch_size)


def mean_step_s(trial: Trial) -> float | None:
    """Wall time of the run over its steps; unlike the median it includes the slow first steps."""
    return finite(trial.batch_size / trial.samples_per_s) if trial.samples_per_s else None


def _step_times(trials: list[Trial]) -> Chart:
    ordered = sorted(trials, key=lambda trial: trial.step_s_p50 or 0.0, reverse=True)  # plotly draws upwards
    # Two trials can have the same label, so positions are numbers and labels only ticks.
    positions: list[Json] = list(range(len(ordered)))
    medians = [(trial.step_s_p50 or 0.0) * 1e3 for trial in ordered]
    means = [(mean_step_s(trial) or 0.0) * 1e3 for trial in ordered]
    waits = [(trial.exposed_embedding_s or 0.0) / (trial.steps or 1) * 1e3 for trial in ordered]
    shares = [exposed_share(trial) for trial in ordered]
    traces: list[Json] = [
        _bars("mean step", positions, means, _STEP_COLOR, 0.7)
        | {
            "text": [f"\u2002median<br>\u2002{median:.3g} ms" for median in medians],
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": "mean %{x:.3f} ms<extra></extra>",
        },
        _bars("of it waiting for rows", positions, waits, _EXPOSED_COLOR, 0.3)
        | {
            "customdata": [["" if share is None else f"<br>{share:.1%} of the run"] for share in shares],
            "hovertemplate": "waits %{x:.3f} ms per step%{customdata[0]}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "median step",
            "y": positions,
            "x": [finite(median) for median in medians],
            "marker": {"color": INK, "symbol": "diamond", "size": 10},
            "hovertemplate": "median %{x:.3f} ms<extra></extra>",
        },
    ]
    labels: list[Json] = [plain(label, 80).replace(", ", "<br>", 1) for label in labels_of(ordered)]
    layout: dict[str, Json] = {
        "barmode": "overlay",
        "xaxis": value_axis("time of a step (ms)", range=[0, 1.4 * max(*medians, *means)]),
        "yaxis": {
            "tickmode": "array",
            "tickvals": positions,
            "ticktext": labels,
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
        },
        "height": 150 + 46 * len(ordered),
    }
    return Chart(
        name="trials",
        title="Measured training steps",
        note="Steps of a training run per setting, the fastest at the top. The inner bar is the time that computation "
        "waited for embedding rows, which a better setting can save. A mean far above the median comes from the slow "
        "first steps of a short run.",
        figures={(): {"data": traces, "layout": layout}},
    )


def _bars(name: str, positions: list[Json], values: list[float], color: str, width: float) -> dict[str, Json]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": positions,
        "x": [finite(value) for value in values],
        "width": width,
        "marker": {"color": color},
    }


def _gantt(trials: list[Trial]) -> Chart:
    choice = Choice(name="trial", label="trial", options=labels_of(trials))
    kinds = list(dict.fromkeys(_kind(span.name) for trial in trials for span in trial.step))
    return Chart(
        name="gantt",
        title="One step, lane by lane",
        note="The actions of a step from the middle of the run; the number after an action is its batch. Work in other "
        "lanes costs no time while the compute lane is busy; a gap in the compute lane does. Drag to zoom.",
        choices=(choice,),
        figures={(number,): _gantt_figure(trial.step, kinds) for number, trial in enumerate(trials)},
    )


def _gantt_figure(spans: Sequence[Span], kinds: Sequence[str]) -> Figure:
    """Gantt chart of one step. `kinds` are those of all trials, so a kind has the same colour in all of them."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    by_kind: dict[str, list[Span]] = {}
    for span in spans:
        by_kind.setdefault(_kind(span.name), []).append(span)
    traces: list[Json] = []
    for kind, members in by_kind.items():
        number = kinds.index(kind)
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(kind),
                "y": [lanes.index(span.lane) for span in members],
                "base": [finite(span.start_s * 1e3) for span in members],
                "x": [finite((span.stop_s - span.start_s) * 1e3) for span in members],
                "width": 0.7,
                "text": [plain(span.name) for span in members],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "customdata": [
                    [plain(span.name), plain(span.lane), finite(span.start_s * 1e3), finite(span.stop_s * 1e3)]
                    for span in members
                ],
                "marker": {
                    "color": _KIND_COLORS[number % len(_KIND_COLORS)],
                    "pattern": {
                        "shape": _KIND_PATTERNS[number // len(_KIND_COLORS) % len(_KIND_PATTERNS)],
                        "fillmode": "overlay",  # keeps the colour, and the name on it readable
                    },
                },
                "hovertemplate": "<b>%{customdata[0]}</b> in %{customdata[1]}<br>%{x:.3f} ms: "
                "%{customdata[2]:.3f} to %{customdata[3]:.3f}<extra></extra>",
            }
        )
    ticks: list[Json] = [plain(lane) for lane in lanes]
    layout: dict[str, Json] = {
        "barmode": "overlay",
        "hovermode": "closest",
        "uniformtext": {"minsize": 10, "mode": "hide"},
        "xaxis": value_axis("time from the step's beginning (ms)"),
        "yaxis": {
            "tickmode": "array",
            "tickvals": list(range(len(lanes))),
            "ticktext": ticks,
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
        "height": 170 + 34 * len(lanes),
    }
    return {"data": traces, "layout": layout}


def _kind(name: str) -> str:
    """``FETCH12`` -> ``FETCH``, ``0SEND_F1:3`` -> ``SEND_F``: the operation without batch, stage and peer."""
    return re.sub(r"\d+|:.*", "", name) or name
