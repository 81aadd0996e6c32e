from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.config.load import parse_config
from bagpipe.errors import InputError
from data.replay.options import KNOWN_POLICIES, parse_sweep
from data.replay.savings import Tried


def test_one_configuration_per_batch_size(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[data]\nbatch_size = 7\nlimit = 50\n[cache]\nrows = 3\n")
    flags = ["--config", str(file), "--model.embedding_dim", "8"]
    sweep = parse_sweep([*flags, "--data.batch_size", "32, 64,32", "--lookahead", "1,8"])
    assert [config.data.batch_size for config in sweep.configs] == [32, 64]
    assert {config.data.limit for config in sweep.configs} == {50}
    assert sweep.lookaheads == (1, 8)
    assert sweep.trainer_flags == tuple(flags)
    assert parse_sweep(flags).configs[0].data.batch_size == 7
    assert parse_sweep([*flags, "--data.batch_size=9,8"]).configs[1].data.batch_size == 8


def test_the_whole_log_unless_a_part_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[data]\neval_fraction = 0.2\n")
    assert parse_sweep([]).configs[0].data.eval_fraction == 0
    assert parse_sweep(["--config", str(file)]).configs[0].data.eval_fraction == 0.2
    assert parse_sweep(["--data.eval_fraction=0.1"]).configs[0].data.eval_fraction == 0.1


def test_the_trainer_gets_the_configuration_and_nothing_else() -> None:
    sweep = parse_sweep(["--train", "--policy", "drop-unused", "--data.limit", "9", "--world_size=2", "--run.seed=4"])
    assert sweep.train
    assert sweep.trainer_flags == ("--data.limit", "9", "--run.seed=4")
    assert (sweep.policies, sweep.world_size) == (("drop-unused",), 2)


def test_an_unknown_policy_beside_known_ones_is_kept_to_be_reported() -> None:
    assert parse_sweep(["--policy", "lru,typo"]).policies == ("lru", "typo")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "typo"], f"--policy must be of {', '.join(KNOWN_POLICIES)}, got 'typo'"),
        (["--policy", ""], "got ''"),
        (["--lookahead", "0"], "--lookahead must be numbers of at least 1 such as 8,32, got '0'"),
        (["--lookahead", "8,x"], "got '8,x'"),
        (["--cache_rows", "-5"], "--cache_rows must be numbers of at least 1"),
        (["--bandwidth", "fast"], "--bandwidth: expected bytes such as 16e9, 16GB or 16GiB, got 'fast'"),
        (["--world_size", "0"], "--world_size must be a number from 1 to 65535, got '0'"),
        (["--jobs", "0"], "--jobs must be a number of at least 1, got '0'"),
        (["--world_size", "2,4"], "--world_size must be a number from 1 to 65535, got '2,4'"),
        (["--cache.rows", "5"], "--cache.rows: replay tries several, expected --cache_rows"),
        (["--oracle.lookahead=5"], "--oracle.lookahead: replay tries several, expected --lookahead"),
        (["--data.batch_size", "8,x"], "--data.batch_size must be an integer, got 'x'"),
        (["--data.batch_size", "8,0"], "--data.batch_size must be at least 1, got 0"),
        (["--data.batch_size"], "expected one argument"),
        (["--lookahed", "5"], "unknown option --lookahed; did you mean --lookahead?"),
        (["--data.format", "criteo-tsv"], "needs data.path"),
        (["--json", "/none/such/out.json"], "--json: folder /none/such does not exist"),
        (["--report", "/"], "--report: cannot write /"),
        (
            ["--train", "--policy", "lru"],
            "--train: only belady-window and drop-unused can be trained with, --policy has none",
        ),
        (["--policy", "none,lru"], "--policy none replays nothing: expected it alone, got 'none,lru'"),
        (
            ["--policy", "none", "--thresholds", "2", "--csv", "a.csv"],
            "--csv has a line for each policy's record, and --policy none has none: expected --json",
        ),
        (["--policy", "none"], "--policy none counts only --thresholds and --limits, expected one of them"),
        (["--thresholds", "0,2"], "--thresholds must be numbers of at least 1 such as 8,32, got '0,2'"),
        (["--thresholds", str(2**31)], "--thresholds must be numbers from 1 to 2**31 - 1, got 2147483648"),
        (["--limits", "1e5,0"], "--limits must be numbers above 0 such as 1e5,1e6, got '1e5,0'"),
        (["--limits", "inf"], "--limits must be numbers above 0"),
        (["--limits", "old"], "--limits must be numbers above 0"),
        (
            ["--thresholds", "2", "--data.min_uses=3"],
            "--data.min_uses: --thresholds replays the log without rules for its rows, expected --thresholds",
        ),
        (
            ["--thresholds", "2", "--data.expire_after", "9"],
            "--data.expire_after: --thresholds replays the log without rules for its rows, expected --limits",
        ),
        (
            ["--limits", "2", "--train"],
            "--train: not possible with --limits, which replays the log without rules for its rows",
        ),
    ],
)
def test_invalid_options_are_refused_immediately(flags: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_sweep(flags)
    assert message in str(error.value)


def test_thresholds_and_limits_take_the_place_of_the_rules_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[data]\nmin_uses = 3\ndefault_row = "zero"\nexpire_after = 9\nexpire_unit = "steps"\n')
    sweep = parse_sweep(["--config", str(file), "--thresholds", "2,5,2", "--limits", "1e5,20", "--policy", "none"])
    assert sweep.tried == Tried(thresholds=(2, 5), limits=(1e5, 20.0), unit="steps", every=1000)
    assert sweep.configs[0].data == parse_sweep([]).configs[0].data
    assert sweep.policies == ()
    unit = parse_sweep(["--limits=7", "--data.expire_unit", "days", "--data.expire_every=10", "--policy", "lru"])
    assert unit.tried == Tried(limits=(7.0,), unit="days", every=10)
    assert (unit.configs[0].data.expires, unit.policies) == (False, ("lru",))


def test_an_output_never_replaces_the_log(tmp_path: Path) -> None:
    log, other = tmp_path / "days" / "day_0.tsv", tmp_path / "log.tsv"
    log.parent.mkdir()
    log.touch()
    other.symlink_to(log)
    refused: tuple[tuple[Path, list[str], str], ...] = (
        (log, ["--json", str(log)], "is data.path"),
        (log, ["--report", str(other)], "is data.path"),
        (log.parent, ["--json", str(log.parent / "out.json")], "is in the folder data.path"),
        (log, ["--json", str(tmp_path / "out"), "--report", str(tmp_path / "out")], "is --json"),
    )
    for path, flags, message in refused:
        with pytest.raises(InputError, match=message):
            parse_sweep(["--data.path", str(path), "--data.format", "criteo-tsv", *flags])
    parse_sweep(["--data.path", str(log), "--data.format", "criteo-tsv", "--json", str(log.parent / "out.json")])


JOB = """
[checkpoint]
every = 50
mirror = "s3://bucket/jobs/a"
change = ["optim.dense_lr"]
start_from = "yesterday"
[eval]
every = 10
patience = 3
keep_best = true
metric = "gauc"
[dense]
shard = "optimizer"
[pipeline]
schedule = "1f1b"
plan = "missing.json"
[data]
limit = 50
"""


def test_what_only_the_trainer_uses_does_not_stop_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder of checkpoints can be a flag of the trainer, and its files on another machine."""
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    (config,) = parse_sweep(["--config", str(file)]).configs
    assert (config.data.limit, config.checkpoint.every) == (50, 50)
    with pytest.raises(InputError, match="needs"):
        parse_config(["--config", str(file), "--pipeline.plan="], "train")
    file.write_text(JOB.replace("patience = 3", "patience = -3"))
    with pytest.raises(InputError, match=r"eval.patience must be at least 0, got -3"):
        parse_sweep(["--config", str(file)])
    file.write_text(JOB.replace("patience", "patients"))
    with pytest.raises(InputError, match=r"unknown key eval.patients; did you mean eval.patience"):
        parse_sweep(["--config", str(file)])
