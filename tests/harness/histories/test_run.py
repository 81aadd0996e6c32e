"""Short histories of real stores: sound ones have no anomaly, and stores with a defect have the one it is known by."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.harness.clock import find_compiler
from tests.harness.histories import cli
from tests.harness.histories import run as histories
from tests.harness.histories.anomalies import Anomaly
from tests.harness.histories.checker import check
from tests.harness.histories.events import Event, Kind, Phase
from tests.harness.histories.history import paired
from tests.harness.histories.plan import FAULT_KINDS, Plan, PlannedFault
from tests.harness.histories.run import PRELOADED, make_history
from tests.harness.zygote import Zygote

pytestmark = [pytest.mark.redis, pytest.mark.multiproc, pytest.mark.usefixtures("no_leaks")]

#: A defect may stay hidden if the machine schedules the clients one after the other.
_TRIES = 10
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(PRELOADED, ROOT) as zygote:
        yield zygote


def plan_of(server: str, *faults: str, undoes: bool = False, num_writers: int = 2) -> Plan:
    kinds = {kind.name: kind for kind in FAULT_KINDS}
    return Plan(
        seed=1,
        server=server,
        num_writers=num_writers,
        num_readers=2,
        undoes=undoes,
        refetches=False,
        faults=tuple(PlannedFault(kind=kinds[name], after=10) for name in faults),
    )


def counts(events: tuple[Event, ...], kind: Kind) -> dict[Phase, int]:
    found = [event.phase for event in events if event.kind is kind]
    return {phase: found.count(phase) for phase in Phase}


def test_a_server_is_killed(zygote: Zygote) -> None:
    events = make_history(plan_of("always", "kill-server", "cut"), zygote)
    assert check(paired(events)) == ()
    assert counts(events, Kind.LOSS)[Phase.INVOKE] == 0, "the server keeps what it acknowledged"
    assert counts(events, Kind.APPEND)[Phase.OK] > 20
    assert counts(events, Kind.APPEND)[Phase.UNKNOWN] > 0


def test_a_server_that_keeps_nothing_is_killed(zygote: Zygote) -> None:
    """The checkpoint's rows come back."""
    events = make_history(plan_of("memory", "no-commit", "kill-server", undoes=True), zygote)
    assert check(paired(events)) == ()
    checkpoints = [event.facts["checkpoint"] for event in events if "checkpoint" in event.facts]
    assert any(checkpoints[-1].values())


def test_a_loss_that_nothing_explains_is_found(zygote: Zygote) -> None:
    """The same server, as if it had promised to keep its rows."""
    events = make_history(plan_of("memory", "kill-server"), zygote)
    assert check(paired(events)) == ()
    without = [event for event in events if event.kind is not Kind.LOSS]
    assert Anomaly.LOST_WRITE in {finding.anomaly for finding in check(paired(without))}


def test_two_writers_of_which_one_is_late(zygote: Zygote) -> None:
    events = make_history(plan_of("memory", "pause-writers", "take-over", "kill-writers"), zygote)
    assert check(paired(events)) == ()
    assert counts(events, Kind.TAKE_OVER)[Phase.OK] >= 5, "one at first, one after each fault, one at the end"
    appends = counts(events, Kind.APPEND)
    assert appends[Phase.FAIL] + appends[Phase.UNKNOWN] > 0, "of writers that were refused or killed"


def test_a_replica_takes_over(zygote: Zygote, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):  # it warns of the failover
        events = make_history(plan_of("cluster", "lagging-fail-over", num_writers=1), zygote)
    assert check(paired(events)) == ()
    assert counts(events, Kind.LOSS)[Phase.OK] == 1
    assert counts(events, Kind.APPEND)[Phase.OK] > 10


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_a_server_is_killed_while_its_disk_syncs(zygote: Zygote) -> None:
    """The last acknowledged appends are gone, which the checker does not mind: a later takeover knows."""
    events = make_history(plan_of("everysec", "kill-syncing-server", undoes=True), zygote)
    assert check(paired(events)) == ()
    assert counts(events, Kind.LOSS)[Phase.OK] == 1


@pytest.mark.parametrize(
    ("defect", "faults", "anomaly"),
    [
        ("unfenced", ("pause-writers",), Anomaly.FENCED_WRITE),
        ("early", ("kill-writers",), Anomaly.LOST_WRITE),
        ("splitting", ("cut",), Anomaly.PARTIAL_GROUP),
    ],
)
def test_a_defect_is_found(zygote: Zygote, defect: str, faults: tuple[str, ...], anomaly: Anomaly) -> None:
    plan = plan_of("memory", *faults)
    assert any(
        anomaly in {finding.anomaly for finding in check(paired(make_history(plan, zygote, defect=defect)))}
        for _ in range(_TRIES)
    )


@pytest.fixture
def command(zygote: Zygote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(histories, "Zygote", lambda *_: nullcontext(zygote))
    monkeypatch.chdir(tmp_path)
    yield
    logging.getLogger("bagpipe").handlers.clear()


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["histories", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(str(ended.value.code))


@pytest.mark.usefixtures("command")
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chosen = ("--servers", "memory", "--kinds", "kill-writers")
    assert run_command(monkeypatch, "--runs", "1", "--seed", "5", *chosen) == 0
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("seed 5 ")
    assert line.endswith(": no anomaly")
    assert "0 with anomalies" in last
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("command")
def test_a_history_with_an_anomaly_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chosen = ("--servers", "memory", "--kinds", "take-over", "--defect", "unfenced")
    assert run_command(monkeypatch, "--runs", "1", "--seed", "3", "--out", "kept", *chosen) == 1
    line, *findings, again, file, last = capsys.readouterr().out.splitlines()
    assert "WRONG: " in line
    assert "fenced-write" in line
    assert any(finding.strip().startswith("fenced-write, ") for finding in findings)
    assert again.endswith("--servers memory --kinds take-over --defect unfenced --seed 3")
    assert file == "    history: kept/history-3.jsonl"
    assert "1 with anomalies, seeds [3]" in last
    assert run_command(monkeypatch, "--check", str(tmp_path / "kept" / "history-3.jsonl")) == 1
    assert "fenced-write" in capsys.readouterr().out


@pytest.mark.usefixtures("command")
def test_a_history_without_writes_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("--servers", "memory", "--kinds", "take-over", "--defect", "refusing")
    assert run_command(monkeypatch, "--runs", "1", "--seed", "3", "--out", "kept", *chosen) == 1
    assert "WRONG: no append was acknowledged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--runs", "0"], "--runs: expected at least 1, got 0"),
        (["--servers", "mainframe"], "expected names among memory, "),
        (["--defect", "ugly"], "--defect: expected one of unfenced, early, splitting, refusing, got ugly"),
        (["--check", "nowhere"], "--check nowhere: "),
    ],
)
@pytest.mark.usefixtures("command")
def test_bad_flags(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, *arguments) == 2
    assert words in capsys.readouterr().err
