"""`python -m bagpipe jigsaw JOBS.toml --ranks N`: simulate several training jobs on one set of ranks.

JOBS.toml, --ranks ──--policy, --full──> timelines ──> text, json, svg, perfetto; --report: one HTML file
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bagpipe.cli.text import aligned
from bagpipe.errors import InputError
from bagpipe.jigsaw.job import TrainingJob
from bagpipe.jigsaw.job_file import jobs_of_toml
from bagpipe.jigsaw.outcome import Outcome, outcome_of, plain_values
from bagpipe.jigsaw.picture import grid, perfetto, svg
from bagpipe.jigsaw.policy import POLICIES
from bagpipe.jigsaw.simulate import run_jobs
from bagpipe.jigsaw.timeline import Timeline
from bagpipe.util.documents import file_text
from bagpipe.util.outputs import check_writable
from bagpipe.util.packages import needed_by

__all__ = ["FORMATS", "add_arguments", "run"]

#: Every policy, with whole backwards and with the file's shares.
_ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = "Simulate several training jobs on one set of ranks, and compare policies of scheduling."
    parser.add_argument("jobs", metavar="JOBS.toml", help="the jobs; docs/jigsaw.md has the fields")
    parser.add_argument("--ranks", required=True, type=int, metavar="N", help="ranks, each for one worker at a time")
    policies = "; ".join(f"{policy.name}: {policy.summary}" for policy in POLICIES.values())
    parser.add_argument(
        "--policy",
        choices=(*POLICIES, _ALL),
        default=_ALL,
        help=f"{policies}; {_ALL} (default): each, with whole backwards and with the shares of the file",
    )
    parser.add_argument("--full", action="store_true", help="whole backwards on all workers, whatever the file says")
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    parser.add_argument("--report", metavar="FILE", help="write one HTML file with charts")


def run(flags: argparse.Namespace) -> str:
    """The figures of each policy, or the timeline of one.

    Raises:
        InputError: a bad flag or file, or the jobs cannot run on these ranks.
        JobError: the report cannot be written because the disk is full.
    """
    if flags.format in _OF_ONE and flags.policy == _ALL:
        raise InputError(f"--format {flags.format}: expected --policy {' or '.join(POLICIES)}, got {_ALL}")
    write_report = _report_writer(flags) if flags.report else None
    jobs = jobs_of_toml(file_text(flags.jobs, subject="jobs"), source=flags.jobs)
    timelines = list(_timelines(jobs, flags))
    if write_report is not None:
        write_report(timelines)
    return _OF_ONE[flags.format](timelines[0]) if flags.format in _OF_ONE else _OF_ALL[flags.format](timelines)


def _report_writer(flags: argparse.Namespace) -> Callable[[Sequence[Timeline]], None]:
    """The function that writes the report; raises InputError before the simulation if it cannot."""
    check_writable(flags.report, "--report")
    with needed_by("--report", "plotly"):
        from bagpipe.jigsaw.report import write_report
    return lambda timelines: write_report(Path(flags.report), timelines, source=Path(flags.jobs).name)


def _timelines(jobs: Sequence[TrainingJob], flags: argparse.Namespace) -> Iterator[Timeline]:
    whole = tuple(job.with_full_backward() for job in jobs)
    is_partial = any(job.is_partial for job in jobs) and not flags.full
    for name in POLICIES if flags.policy == _ALL else (flags.policy,):
        if flags.policy == _ALL or not is_partial:
            yield run_jobs(whole, flags.ranks, POLICIES[name])
        if is_partial:
            yield run_jobs(jobs, flags.ranks, POLICIES[name])


def _text(timelines: Sequence[Timeline]) -> str:
    """Tables of the runs and of the jobs; of one run its timeline, too."""
    outcomes = [outcome_of(timeline) for timeline in timelines]
    lines = [*aligned(_runs(outcomes)), "", *aligned(_jobs(outcomes))]
    if len(timelines) == 1:
        lines += ["", *grid(timelines[0]).splitlines()]
    return "\n".join(lines) + "\n"


def _runs(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    head = ("policy", "backward", "makespan s", "efficiency", "backward done", "mean job s", "late", "ranks")
    return [
        head,
        *(
            (
                found.policy,
                found.backward,
                f"{found.makespan_s:.4g}",
                f"{found.efficiency:.1%}",
                f"{found.backward_share:.1%}",
                f"{found.mean_finish_s:.4g}",
                str(found.num_late),
                _range(found.utilisation),
            )
            for found in outcomes
        ),
    ]


def _range(utilisation: Sequence[float]) -> str:
    """The utilisation of the ranks: of each, or of the idlest and the busiest of many."""
    if len(utilisation) > 4:
        return f"{min(utilisation):.1%} to {max(utilisation):.1%}"
    return " ".join(f"{share:.1%}" for share in utilisation)


def _jobs(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("job", "policy", "backward", "start s", "finish s", "deadline s", "iteration s", "backward done")
    ]
    for number in range(len(outcomes[0].jobs)):
        for found in outcomes:
            job = found.jobs[number]
            deadline = "" if job.deadline_s is None else f"{job.deadline_s:.4g}{' late' if job.is_late else ''}"
            rows.append(
                (
                    job.name,
                    found.policy,
                    found.backward,
                    f"{job.start_s:.4g}",
                    f"{job.finish_s:.4g}",
                    deadline,
                    f"{job.iteration_s:.4g}",
                    f"{job.backward_share:.1%}",
                )
            )
    return rows


def _json(timelines: Sequence[Timeline]) -> str:
    runs = [plain_values(timeline) for timeline in timelines]
    return json.dumps({"ranks": timelines[0].ranks, "runs": runs}, indent=1) + "\n"


#: Formats that draw one timeline, and those that show all.
_OF_ONE: Mapping[str, Callable[[Timeline], str]] = {"svg": svg, "perfetto": perfetto}
_OF_ALL: Mapping[str, Callable[[Sequence[Timeline]], str]] = {"text": _text, "json": _json}

FORMATS = (*_OF_ALL, *_OF_ONE)
