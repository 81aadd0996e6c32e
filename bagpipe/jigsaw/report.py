"""The report of several policies: one HTML file with efficiency, timelines, and what each job and rank gets.

Timelines ──outcome_of──> tables;  ──shown_s──> bars of pieces and exchanges  ──> one page in the frame of reports
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from bagpipe.jigsaw.outcome import JobOutcome, Outcome, outcome_of
from bagpipe.jigsaw.picture import fills_of, lanes_of, letter_of, shown_s
from bagpipe.jigsaw.timeline import Timeline
from bagpipe.report.charts import Chart, Choice, Figure, Json, plain, value_axis
from bagpipe.report.page import Page, chart_html, render, section, write_page
from bagpipe.report.tables import Column, escape, table

__all__ = ["render_page", "write_report"]

#: Widths of the shortest forward that a timeline has.
_CELLS = 400

_Run: TypeAlias = tuple[Timeline, Outcome]
_JobOfRun: TypeAlias = tuple[Timeline, JobOutcome]


def write_report(path: Path, timelines: Sequence[Timeline], *, source: str) -> None:
    """Write the report. Equal input gives equal bytes; the file appears when complete.

    Args:
        path: of the file.
        timelines: of the same jobs on the same ranks; at least one.
        source: name of the file of jobs.

    Raises:
        JobError: the file cannot be written.
    """
    write_page(path, render_page(timelines, source=source))


def render_page(timelines: Sequence[Timeline], *, source: str) -> str:
    """The whole report as text."""
    runs = [(timeline, outcome_of(timeline)) for timeline in timelines]
    jobs = [(timeline, job) for timeline, outcome in runs for job in outcome.jobs]
    charts = [_efficiency_chart(runs), _timeline_chart(runs)]
    efficiency, drawn = map(chart_html, charts)
    page = Page(
        title=f"Jobs of {source}",
        header=f"<h1>Jobs of <code>{escape(source)}</code></h1>\n"
        f"<p>{len(timelines[0].jobs):,} jobs on {timelines[0].ranks:,} ranks, simulated.</p>",
        lead="",
        body="\n".join(
            (
                section("Policies", [efficiency, _runs_table(runs)]),
                section("Timelines", [drawn]),
                section("Jobs", [_jobs_table(jobs)]),
            )
        ),
        footer="<p>Simulated, not measured: docs/jigsaw.md says what the model leaves out. Efficiency counts the "
        "computation that is done; runs with partial backwards do less of it, see the column of the backward.</p>",
        charts=charts,
    )
    return render(page)


def _efficiency_chart(runs: Sequence[_Run]) -> Chart:
    traces: list[Json] = []
    for backward, color in (("full", "#0072b2"), ("partial", "#e69f00")):
        own = [outcome for _, outcome in runs if outcome.backward == backward]
        if own:
            traces.append(
                {
                    "type": "bar",
                    "name": f"{backward} backward",
                    "x": [outcome.policy for outcome in own],
                    "y": [outcome.efficiency for outcome in own],
                    "text": [f"{outcome.makespan_s:.4g} s" for outcome in own],
                    "marker": {"color": color},
                    "hovertemplate": f"%{{x}}, {backward} backward: %{{y:.1%}}<extra></extra>",
                    "showlegend": True,
                }
            )
    layout: dict[str, Json] = {
        "xaxis": value_axis(""),
        "yaxis": value_axis("computing ranks", tickformat=".0%", range=[0, 1]),
        "barmode": "group",
    }
    return Chart(
        name="efficiency",
        title="Efficiency of the cluster",
        note="Mean share of the makespan in which a rank computes; the text of a bar is the makespan. Partial "
        "backwards are less work: compare bars of one colour, or makespans.",
        figures={(): {"data": traces, "layout": layout}},
    )


def _timeline_chart(runs: Sequence[_Run]) -> Chart:
    return Chart(
        name="timeline",
        title="What the ranks do",
        note="Dark: forward; light: backward; below the ranks, the exchange of each job's gradients. Gaps are idle. A "
        "timeline that is too long is cut.",
        choices=(
            Choice(
                name="run",
                label="Policy",
                options=tuple(timeline.label for timeline, _ in runs),
                default=len(runs) - 1,
            ),
        ),
        figures={(number,): _bars(timeline) for number, (timeline, _) in enumerate(runs)},
    )


def _bars(timeline: Timeline) -> Figure:
    """Three traces for each job: forwards, backwards and exchanges."""
    shown = shown_s(timeline, _CELLS)
    end_s = timeline.first_s + shown
    traces: list[Json] = []
    for number, job in enumerate(timeline.jobs):
        pieces = [piece for piece in timeline.pieces if piece.job == number and piece.start_s < end_s]
        exchanges = [each for each in timeline.exchanges if each.job == number and each.start_s < end_s]
        forward, backward = fills_of(number)
        lanes = [f"rank {piece.rank}" for piece in pieces]
        texts = [f"{plain(job.name)}: iteration {piece.iteration}, worker {piece.worker}" for piece in pieces]
        starts = [piece.start_s for piece in pieces]
        ends = [piece.forward_end_s for piece in pieces]
        lasts = [piece.finish_s for piece in pieces]
        lane = f"exchange {letter_of(number)}"
        net_texts = [f"{plain(job.name)}: exchange of iteration {each.iteration}" for each in exchanges]
        for what, color, places, texts_of, first, last in (
            ("forward", forward, lanes, texts, starts, ends),
            ("backward", backward, lanes, texts, ends, lasts),
            (
                "exchange",
                forward,
                [lane] * len(exchanges),
                net_texts,
                [each.start_s for each in exchanges],
                [each.finish_s for each in exchanges],
            ),
        ):
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": f"{letter_of(number)} {plain(job.name)}",
                    "legendgroup": str(number),
                    "showlegend": what == "forward",
                    "y": places,
                    "base": first,
                    "x": [end - start for start, end in zip(first, last, strict=True)],
                    "text": [f"{text}, {what}" for text in texts_of],
                    "textposition": "none",
                    "marker": {"color": color},
                    "hovertemplate": "%{text}<br>from %{base:.5~g} s<extra></extra>",
                }
            )
    lanes = lanes_of(timeline)
    layout: dict[str, Json] = {
        "xaxis": value_axis("seconds", range=[timeline.first_s, end_s]),
        "yaxis": value_axis("", categoryorder="array", categoryarray=lanes[::-1]),
        "height": 140 + 30 * len(lanes),
        "barmode": "overlay",
    }
    return {"data": traces, "layout": layout}


def _runs_table(runs: Sequence[_Run]) -> str:
    columns: list[Column[_Run]] = [
        Column(title="policy", value=lambda run: run[0].policy),
        Column(title="backward", value=lambda run: run[1].backward),
        Column(title="makespan s", value=lambda run: run[1].makespan_s, text=_four, hint="first arrival to last end"),
        Column(title="efficiency", value=lambda run: run[1].efficiency, text=_share, hint="mean of the ranks"),
        Column(
            title="backward done",
            value=lambda run: run[1].backward_share,
            text=_share,
            hint="seconds of the backwards over those of whole backwards",
        ),
        Column(title="mean job s", value=lambda run: run[1].mean_finish_s, text=_four, hint="arrival to end"),
        Column(title="late", value=lambda run: run[1].num_late, hint="jobs that missed their deadline"),
        Column(title="idlest rank", value=lambda run: min(run[1].utilisation), text=_share),
        Column(title="busiest rank", value=lambda run: max(run[1].utilisation), text=_share),
    ]
    return table("policies", columns, runs, setting_columns=2)


def _jobs_table(jobs: Sequence[_JobOfRun]) -> str:
    columns: list[Column[_JobOfRun]] = [
        Column(title="job", value=lambda item: item[1].name),
        Column(title="policy", value=lambda item: item[0].label),
        Column(title="workers", value=lambda item: item[1].workers),
        Column(title="iterations", value=lambda item: item[1].iterations),
        Column(title="start s", value=lambda item: item[1].start_s, text=_four),
        Column(title="finish s", value=lambda item: item[1].finish_s, text=_four),
        Column(title="deadline s", value=lambda item: item[1].deadline_s, text=_four),
        Column(title="late", value=lambda item: "late" if item[1].is_late else None),
        Column(title="iteration s", value=lambda item: item[1].iteration_s, text=_four, hint="mean"),
        Column(title="backward done", value=lambda item: item[1].backward_share, text=_share),
    ]
    return table("jobs", columns, jobs, setting_columns=2)


def _four(value: float) -> str:
    return f"{value:,.4g}"


def _share(value: float) -> str:
    return f"{value:.1%}"
