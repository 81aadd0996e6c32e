from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

import pytest

from bagpipe.config.load import parse_config
from bagpipe.config.sections import CheckpointConfig
from bagpipe.pipeline.trace import Trace
from data.replay.options import parse_sweep
from data.replay.records import ReplayRecord, Setting, Span, Trial
from data.replay.trials import _run, spans_of_step, trainer_command, trial_settings, with_trials

SETTING = Setting(policy="drop-unused", lookahead=8, cache_rows=20, batch_size=4, world_size=1)


def record(cache_rows: int, error: str | None = None, lookahead: int = 8) -> ReplayRecord:
    return ReplayRecord(
        policy="drop-unused", lookahead=lookahead, cache_rows=cache_rows, batch_size=4, world_size=1, error=error
    )


def test_the_setting_its_neighbours_and_direct_mode() -> None:
    records = [record(40), record(5), record(20), record(10), record(30, "too small"), record(15, lookahead=1)]
    assert [setting.cache_rows for setting in trial_settings(SETTING, records)] == [20, 10, 40, 0]
    assert [setting.cache_rows for setting in trial_settings(SETTING, [record(20)])] == [20, 0]


def test_the_trainer_trains_what_was_replayed(tmp_path: Path) -> None:
    sweep = parse_sweep(["--data.limit", "99", "--checkpoint.dir", "kept", "--checkpoint.every", "5", "--train"])
    command = trainer_command(SETTING, sweep, tmp_path / "r.json", tmp_path / "t.json")
    start = command.index("trainer") + 1
    config = parse_config([flag for flag in command[start:] if not flag.startswith("--result")], "trainer").config
    assert (config.data.limit, config.data.batch_size, config.data.eval_fraction) == (99, 4, 0)
    assert (config.oracle.policy, config.oracle.lookahead, config.cache.rows) == ("drop-unused", 8, 20)
    assert (config.checkpoint.dir, config.run.trace) == ("", str(tmp_path / "t.json"))
    assert config.store.namespace.startswith("bagpipe.trial-")


@pytest.mark.parametrize("held_out", [True, False])
def test_a_trial_needs_no_checkpoint(tmp_path: Path, held_out: bool) -> None:
    """Whatever keys of the job need one, or evaluations, which the replayed log has only if a part is held out."""
    file = tmp_path / "job.toml"
    file.write_text(
        "[checkpoint]\ndir = 'a'\nevery = 5\nmirror = 's3://b/c'\nstart_from = 'd'\nstart_without = ['*']\n"
        "change = ['optim.dense_lr']\nresume = 'best'\n[eval]\nevery = 3\npatience = 2\nkeep_best = true\n"
        "[optim]\nschedule = 'plateau'\n[data]\ntest_path = 'e'\npath = 'f'\nformat = 'csv'\n"
        + ("eval_fraction = 0.1\n" if held_out else "eval_fraction = 0\n")
    )
    sweep = parse_sweep(["--config", str(file), "--train"])
    command = trainer_command(SETTING, sweep, tmp_path / "r.json", tmp_path / "t.json")
    flags = command[command.index("trainer") + 1 :]
    config = parse_config([flag for flag in flags if not flag.startswith("--result")], "trainer").config
    assert config.checkpoint == CheckpointConfig()
    assert (config.eval.every, config.optim.schedule) == ((3, "plateau") if held_out else (0, "constant"))


def test_several_ranks_go_through_torchruns_launcher(tmp_path: Path) -> None:
    sweep = parse_sweep(["--world_size", "2"])
    setting = Setting(policy="drop-unused", lookahead=8, cache_rows=20, batch_size=4, world_size=2)
    command = trainer_command(setting, sweep, tmp_path / "r.json", tmp_path / "t.json")
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_times_belong_to_their_records() -> None:
    trial = Trial(**dataclasses.asdict(SETTING), step_s_p50=0.5, samples_per_s=8.0, exposed_embedding_s=0.1)
    direct = dataclasses.replace(trial, cache_rows=0)
    failed = dataclasses.replace(trial, cache_rows=40, error="too small", step_s_p50=None)
    found = with_trials([record(20), record(40), record(20, lookahead=1)], [trial, failed, direct])
    assert [item.step_s_p50 for item in found] == [0.5, None, None]
    assert (found[0].samples_per_s, found[0].exposed_embedding_s) == (8.0, 0.1)


def test_a_run_ends_with_the_replay(tmp_path: Path) -> None:
    """The trial interrupts the replay and waits for its own termination."""
    run = """
import os, pathlib, signal, sys
def end(*_):
    pathlib.Path(sys.argv[1]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _run([sys.executable, "-c", run, str(tmp_path / "ended")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "ended").exists()


def test_the_middle_step_of_a_trace_is_cut_out(tmp_path: Path) -> None:
    trace, ms = Trace(), 1_000_000
    for batch in range(5):
        start = 100 * ms * batch
        trace.note("net-in", "0X_FETCH", batch + 2, start - 30 * ms, start + 20 * ms)
        trace.note("compute", "0F", batch, start, start + 60 * ms)
        trace.note("compute", "wait 0X_INSERT #", batch, start + 60 * ms, start + 70 * ms, category="wait")
        trace.note("compute", "0OPT", batch, start + 70 * ms, start + 100 * ms)
    trace.write(tmp_path / "trace.json", lanes=("compute", "net-in"))
    # The step is number 3, with steps 1 to 4 eligible: from 300 to 400 ms.
    assert spans_of_step(tmp_path / "trace.json") == (
        Span(lane="compute", name="0F3", start_s=0.0, stop_s=0.06),
        Span(lane="compute", name="0OPT3", start_s=0.07, stop_s=0.1),
        Span(lane="net-in", name="0X_FETCH5", start_s=0.0, stop_s=0.02),
        Span(lane="net-in", name="0X_FETCH6", start_s=0.07, stop_s=0.1),
    )


def test_a_trace_without_two_steps_shows_none(tmp_path: Path) -> None:
    trace = Trace()
    trace.note("compute", "0OPT", 0, 0, 5)
    trace.write(tmp_path / "trace.json")
    assert spans_of_step(tmp_path / "trace.json") == ()
