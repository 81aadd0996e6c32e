"""`make_history`: one history after a plan, and `judge`: what the checker says of it.

clients begin ──> for each fault: appends ─> maybe a checkpoint ─> the fault ─> appends ─> a takeover where one is due
              ──> clients end ──> a last takeover, and a last read of all rows
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.harness.histories.anomalies import Finding
from tests.harness.histories.checker import check
from tests.harness.histories.clients import Budget, Reader
from tests.harness.histories.events import Event, Kind, Phase, Recorder, to_lines
from tests.harness.histories.hand import read_lists
from tests.harness.histories.history import paired
from tests.harness.histories.jobs import Jobs
from tests.harness.histories.nemesis import Nemesis
from tests.harness.histories.plan import Plan, draw_plan
from tests.harness.histories.rows import NUM_ROWS
from tests.harness.histories.sites import BUCKETS, connect, open_site
from tests.harness.zygote import Zygote
from tests.store.nodes import await_true

__all__ = ["PRELOADED", "Verdict", "judge", "make_history", "run_many"]

#: Imported once for all writers' processes.
PRELOADED = ("bagpipe.store.redis.store", "tests.harness.histories.hand")

#: Appends after a fault, before a takeover.
_APPENDS_AFTER = 8
#: Reads for each append.
_READS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a history.

    Attributes:
        plan: of the history.
        num_operations: by what became of them: ok, fail, unknown.
        num_appends: acknowledged ones. A history without any shows nothing.
        findings: of the checker.
        seconds: wall time.
        file: of the events, if there is a problem.
    """

    plan: Plan
    num_operations: Counter[str]
    num_appends: int
    findings: tuple[Finding, ...]
    seconds: float
    file: str = ""

    @property
    def problem(self) -> str:
        """The kinds of anomalies, or why the history shows nothing; empty if it is sound."""
        if not self.num_appends:
            return "no append was acknowledged"
        return ", ".join(dict.fromkeys(finding.anomaly.value for finding in self.findings))


def run_many(
    seeds: Sequence[int], *, servers: Sequence[str] = (), kinds: Sequence[str] = (), defect: str = "", out: Path
) -> Iterator[Verdict]:
    """Make and judge one history for each seed.

    Args:
        seeds: of the histories.
        servers, kinds: as in `draw_plan`.
        defect: as in `make_history`.
        out: folder for the files of histories with anomalies.

    Raises:
        ValueError: as `draw_plan`.
    """
    plans = [draw_plan(seed, servers=servers, kinds=kinds) for seed in seeds]
    with Zygote(PRELOADED, Path.cwd()) as zygote:
        for plan in plans:
            start_s = time.monotonic()
            events = make_history(plan, zygote, defect=defect)
            yield judge(plan, events, time.monotonic() - start_s, out)


def judge(plan: Plan, events: Sequence[Event], seconds: float, out: Path) -> Verdict:
    """The verdict; a history with a problem is written to ``out/history-SEED.jsonl``."""
    findings = check(paired(events))
    verdict = Verdict(
        plan=plan,
        num_operations=Counter(event.phase.value for event in events if event.phase is not Phase.INVOKE),
        num_appends=sum(event.kind is Kind.APPEND and event.phase is Phase.OK for event in events),
        findings=findings,
        seconds=seconds,
    )
    if not verdict.problem:
        return verdict
    file = out / f"history-{plan.seed}.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(to_lines(events))
    return replace(verdict, file=str(file))


def make_history(plan: Plan, zygote: Zygote, *, defect: str = "") -> tuple[Event, ...]:
    """The events of a history.

    Args:
        plan: of the history.
        zygote: has imported `PRELOADED`.
        defect: of the writers' stores, see `tests.harness.histories.broken`; empty: none.

    Raises:
        StoreError, InputError, TimeoutError: servers or jobs do not come back.
    """
    draw, recorder, budget, reads = random.Random(f"clients {plan.seed}"), Recorder(), Budget(), Budget()
    recorder.invoke("plan", Kind.SETTING, seed=plan.seed, server=plan.server, plan=str(plan), buckets=BUCKETS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-history-")))
        site = stack.enter_context(open_site(plan.server, folder))
        jobs = Jobs(
            plan=plan,
            site=site,
            zygote=zygote,
            folder=folder,
            recorder=recorder,
            budget=budget,
            draw=draw,
            defect=defect,
        )
        nemesis = Nemesis(site, jobs, recorder, budget, draw)
        with jobs:
            jobs.take_over()
            for number in range(plan.num_readers):
                reader = Reader(
                    f"reader-{number}",
                    connect=partial(connect, site.options),
                    num_rows=NUM_ROWS,
                    recorder=recorder,
                    budget=reads,
                    draw=random.Random(draw.getrandbits(32)),
                )
                stack.callback(reader.close)
                stack.callback(reads.close)

            def let_append(number: int) -> None:
                target = recorder.num_appends + number
                budget.add(number)
                reads.add(_READS * number)
                await_true(lambda: recorder.num_appends >= target or jobs.has_ended, "appends")

            for fault in plan.faults:
                let_append(fault.after)
                if plan.undoes and draw.random() < 0.5:
                    jobs.checkpoint()
                budget.add(_APPENDS_AFTER)  # the fault meets clients at work
                reads.add(_READS * _APPENDS_AFTER)
                nemesis.fire(fault.kind)
                let_append(_APPENDS_AFTER)
                if fault.kind.takes_over or jobs.has_ended:
                    jobs.take_over()
            let_append(_APPENDS_AFTER)
        jobs.take_over(with_writers=False)
        with connect(site.options) as store:
            for _ in range(2):
                invoked = recorder.invoke("last", Kind.READ, rows=list(range(NUM_ROWS)))
                facts = read_lists(store, range(NUM_ROWS))
                recorder.complete(invoked, Phase(facts.pop("phase")), **facts)
    return recorder.events
