"""The command line, and the golden tables it prints. Regenerate: ``BAGPIPE_REGENERATE=1 pytest tests/cli``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bagpipe.cli.main import main
from bagpipe.cli.schedule import FORMATS
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, DENSE_SCHEDULES, SCHEDULES

GOLDEN = sorted((Path(__file__).parent.parent / "golden" / "schedules").glob("*.txt"))
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "schedules.md"
PROMPT = "$ python -m bagpipe "


def transcript(commands: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    blocks = []
    for command in commands:
        assert main(shlex.split(command)) == 0
        blocks.append(f"{PROMPT}{command}\n{capsys.readouterr().out}")
    return "\n".join(blocks)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = path.read_text(encoding="utf-8")
    commands = [line.removeprefix(PROMPT) for line in expected.splitlines() if line.startswith(PROMPT)]
    actual = transcript(commands, capsys)
    if os.environ.get("BAGPIPE_REGENERATE"):
        path.write_text(actual, encoding="utf-8")
    assert actual == expected


def test_the_documentation_shows_the_printed_output(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = DOCUMENTATION.read_text(encoding="utf-8").split("```\n")[1::2]
    shown = [block for block in blocks if block.startswith(PROMPT)]
    commands = [block.partition("\n")[0].removeprefix(PROMPT) for block in shown]
    assert {command.split()[1] for command in commands} == set(SCHEDULES) - {"prefetch"}
    assert [transcript([command], capsys) for command in commands] == shown


def test_there_are_golden_tables() -> None:
    assert GOLDEN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("schedule no-such", "invalid choice: 'no-such'"),
        ("no-such", "invalid choice: 'no-such'"),
        ("", "required: COMMAND"),
        ("schedule", "required: NAME"),
        ("schedule prefetch --batches many", "invalid int value: 'many'"),
        ("schedule prefetch --batches -1", "at least 0, got -1"),
        ("schedule prefetch --prefetch-depth 0", "prefetch_depth must be at least 1, got 0"),
        ("schedule prefetch --format pdf", "invalid choice: 'pdf'"),
        ("schedule prefetch --width 10", "--width: expected at least 300 pixels, got 10"),
        ("schedule prefetch --depth 3", "unrecognized arguments: --depth 3"),
        ("schedule prefetch --cost FETCH=1", "unknown op 'FETCH'"),
        ("schedule prefetch --cost F", "expected F=NUMBER"),
        ("schedule prefetch --cost F=-1", "at least 0"),
        ("schedule prefetch --cost F=nan", "at least 0"),
        ("schedule prefetch --latency -1", "--latency: expected a number of at least 0, got -1"),
        ("schedule prefetch --latency slow", "--latency: expected a number, got 'slow'"),
        ("schedule 1f1b --stages 0", "stages must be 1 to 100000, got 0"),
        ("schedule 1f1b --microbatches -2", "expected numbers such as 8 or 32,16,8, got '-2'"),
        ("schedule 1f1b --microbatches 0", "at least 1"),
        ("schedule interleaved --stages 5", "interleaved: stages must be a multiple of 2 chunks, got 5"),
        ("schedule zb-v --chunks 3", "zb-v: chunks must be 2, got 3"),
        ("schedule dualpipe-v --stages 8 --microbatches 4", "must be at least 8, the number of stages, got 4"),
        ("schedule chimera --stages 3", "chimera: stages must be a multiple of 2, got 3"),
        ("schedule pipedream-2bw --microbatches 2", "must be at least 3, one less than the stages, got 2"),
        ("schedule pipedream --batches -1", "at least 0, got -1"),
        ("schedule pipedream --prediction-offset 1", "unrecognized arguments: --prediction-offset 1"),
        ("schedule graph --edges 0-1,1-0", "the stage graph has a cycle: 0 -> 1 -> 0"),
        ("schedule 1f1b --cost no-such-file.json", "No such file"),
        ("schedule 1f1b --recompute-share 0.5,1", "--recompute-share: expected 1 recomputed share or 4, one per stage"),
        ("schedule 1f1b --activation-bytes 2", "--activation-bytes: 2 needs --recompute-share auto, got none"),
        (
            "schedule 1f1b --precondition 2,1",
            "--precondition: expected 1 number of layers or 4, one per stage, got 2,1",
        ),
        ("schedule 1f1b --precondition two", "--precondition: expected layers per stage such as 2 or 2,1,1,3"),
        (
            "schedule 1f1b --precondition 0",
            "--precondition: no stage has a layer whose gradients can be preconditioned",
        ),
        (
            "schedule 1f1b --precondition 2 --precondition-lag 2",
            "--precondition: inverses can be those of the batch or",
        ),
        ("schedule 1f1b --precondition-lag 1", "--precondition-lag: 1 needs --precondition, got none"),
        (
            "schedule dynamic --precondition 2",
            "dynamic: preconditioning needs an order of actions that is known before",
        ),
        ("schedule pipedream --precondition 2", "preconditioning needs a synchronous program"),
        ("schedule prefetch --precondition 2", "unrecognized arguments: --precondition 2"),
        ("schedule zb-h1 --recompute-share auto --activation-bytes 1", "is on a rank that keeps"),
        ("schedule 1f1b --backward-shares 0.5", "--backward-shares: backward shares 0.5 never reach stage 0 of 4"),
        ("schedule 1f1b --backward-shares 2,1", "--backward-shares: backward shares must be 0 to 1"),
        ("schedule 1f1b --backward-shares x", "--backward-shares: expected backward shares such as 0.5,1, got 'x'"),
        ("schedule 1f1b --backward-shares 0.5,1 --precondition 1", "0.5,1 is not possible with --precondition"),
        ("schedule 1f1b --backward-shares 1 --batch -1", "--batch: expected at least 0, got -1"),
        ("schedule pipedream-2bw --backward-shares 0.5,1", "unrecognized arguments: --backward-shares 0.5,1"),
        ("schedule dynamic --backward-shares 0.5,1", "unrecognized arguments: --backward-shares 0.5,1"),
        ("schedule 1f1b --lower sends,reduce", "--lower: unknown pass 'reduce'; there are flatten-pipes, recompute,"),
        ("schedule 1f1b --lower sends,sends", "0SENDX_F0:1 appears 2 times"),
        ("schedule prefetch --lower sends", "only outputs and gradients pass between processes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(shlex.split(arguments))
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_an_unknown_schedule_error_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["schedule", "2f2b"])
    line = capsys.readouterr().err
    assert all(name in line for name in SCHEDULES)
    assert line.count("\n") == 1


def figures(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(shlex.split(f"schedule {arguments} --format json")) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    values = figures("prefetch --cost X_FETCH=2.5,0F=3", capsys)
    assert values["peak_in_flight"] == [0, 0, 0, 1, 0]
    assert len(values["own_span_idle"]) == len(values["lanes"]) == 5
    values = figures("1f1b --stages 4 --microbatches 8", capsys)
    assert (values["makespan"], values["bubble"]) == (33, 3 / 8)
    assert values["peak_in_flight"] == [4, 3, 2, 1]
    assert values["own_span_idle"] == [9, 6, 3, 0]


def test_ranks_are_stages_by_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures("interleaved --stages 8 --microbatches 16", capsys)["peak_in_flight"] == [11, 9, 7, 5]
    assert figures("interleaved --stages 16 --chunks 4 --microbatches 16", capsys)["peak_in_flight"] == [19, 17, 15, 13]
    assert figures("chimera --stages 4 --microbatches 4 --cost B=1", capsys)["peak_in_flight"] == [3, 4, 4, 3]


def test_ranks_beyond_nine_are_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures("1f1b --stages 12 --microbatches 12", capsys)["peak_in_flight"] == list(range(12, 0, -1))


def test_latency_is_added_between_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures("1f1b --stages 4 --microbatches 16 --latency 0.5", capsys)["makespan"] == 71
    assert figures("eager-1f1b --stages 4 --microbatches 16 --latency 1", capsys)["makespan"] == 63


@pytest.mark.parametrize(
    ("costs", "makespan"),
    [
        ({"F": 2, "B": 3}, (2 + 3) * (4 + 1)),
        ({"F": [9, 2, 1], "0B": 3, "1B": 3}, (2 + 3) * (4 + 1)),  # the median of the measured ones
        ({"F": 1, "B": 2, "1B3": 12}, 3 * 5 + 10),
    ],
)
def test_costs_from_a_file(
    costs: dict[str, object], makespan: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs), encoding="utf-8")
    assert figures(f"1f1b --stages 2 --microbatches 4 --cost {path}", capsys)["makespan"] == makespan


@pytest.mark.parametrize(
    ("schedule", "text", "message"),
    [
        ("1f1b", '{"0F": 1, "1F": 1, "B": 2}', "no duration for stage 2: expected 2F or F"),
        ("zb-h1", '{"F": 1, "I": 1, "0W": 2}', "no duration for stage 1: expected 1W or W"),
        ("dualpipe-v", '{"F": 1, "I": 1, "W": 1}', "expected 3B or B"),
        ("1f1b", '{"F": 1, "B": "2"}', "B: expected a number"),
        ("1f1b", '{"F": 1, "B": -2}', "B: expected a number of at least 0, got -2"),
        ("1f1b", '{"F": 1, "BW": 2}', "unknown op 'BW'"),
        ("1f1b", "[1, 2]", "expected an object of durations"),
        ("1f1b", "F=1", "costs.json: Expecting value"),
    ],
)
def test_a_bad_cost_file_is_one_line(
    schedule: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="utf-8")
    assert main(["schedule", schedule, "--cost", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("form", FORMATS)
def test_every_schedule_prints_in_every_form(name: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", name, "--format", form]) == 0
    assert capsys.readouterr().out


def test_a_lowered_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "schedule 1f1b --stages 2 --microbatches 2 --format csv --lower reduce-grad,optimizer,sends,defer-receives"
    )
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == (
        "#resource=rank0,rank1,reduce0,reduce1\n"
        "0F0,0SENDX_F0:1,0F1,0SENDX_F1:1,0RECVX_B0:1,0B0,0RECVX_B1:1,0B1,0OPT0\n"
        "1RECVX_F0:0,1F0,1B0,1SENDX_B0:0,1RECVX_F1:0,1F1,1B1,1SENDX_B1:0,1OPT0\n"
        "0REDUCE_GRAD0\n"
        "1REDUCE_GRAD0\n"
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", DENSE_SCHEDULES)
def test_every_schedule_can_be_lowered(name: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    passes = "flatten-pipes,recompute,merge-input-weight,unshard-reshard,reduce-grad,optimizer,sends,defer-receives"
    assert main(["schedule", name, "--format", form, "--lower", passes]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", ASYNCHRONOUS_SCHEDULES)
def test_an_asynchronous_schedule_can_be_lowered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"schedule {name} --stages 2 --microbatches 2 --format csv --lower merge-input-weight,reduce-grad,sends"
    assert main(shlex.split(command)) == 0
    assert "0SENDX_F0:1" in capsys.readouterr().out


def test_recorded_orders_are_checked_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "orders"
    command = ["schedule", "dynamic", "--stages", "1", "--microbatches", "2", "--format", "csv", "--orders", str(path)]
    header = "# bagpipe orders 1: stages 1, microbatches 2, replicas 1, model 0123"
    path.write_text(f"{header}\nbatch 7 replica 0 rank 0: 0F0,0B0,0F1,0B1\n", encoding="utf-8")
    assert main([*command, "--batch", "7"]) == 0
    assert capsys.readouterr().out == "0F0,0B0,0F1,0B1\n"
    assert main(command) == 2
    assert capsys.readouterr().err.endswith(f"error: --orders {path}: there is no batch 0 of replica 0\n")
    path.unlink()
    assert main(command) == 2
    assert "No such file" in capsys.readouterr().err


def test_second_order_work_is_placed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    command = "1f1b --stages 4 --microbatches 4 --precondition 2,2,0,2 --precondition-lag 1 --cost X_INV=2"
    values = figures(command, capsys)
    found = values["precondition"]
    assert set(found["lanes"]) == {"rank0", "rank1", "rank3"}
    assert values["makespan"] >= found["makespan_plain"] == 22
    assert found["period_plain"] < found["period_without_work"] <= found["period"] <= found["period_bound"]
    placed = [item["action"] for lane in found["lanes"].values() for item in lane["placed"]]
    unfit = [action for lane in found["lanes"].values() for action in lane["unfit"]]
    assert len(set(placed + unfit)) == len(placed + unfit) == 3 * (4 + 4 + 2)
    assert "precondition" not in figures("1f1b", capsys)


@pytest.mark.parametrize("name", sorted(DENSE_SCHEDULES.keys() - ASYNCHRONOUS_SCHEDULES.keys() - {"dynamic"}))
def test_every_synchronous_schedule_takes_second_order_work(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for form, shown in (("grid", "second-order work: "), ("svg", "COV_A: add the micro-batch's"), ("csv", "COV_A0")):
        assert main(["schedule", name, "--precondition", "1", "--format", form, "--lower", "sends"]) == 0
        assert shown in capsys.readouterr().out


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_a_version_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", name, "--versions"]) == 0
    assert capsys.readouterr().out.startswith(
        "stage 0 keeps 1 version" if name in DENSE_SCHEDULES else "stage 0 keeps "
    )


def test_a_subprocess_prints_a_schedule_without_torch_or_numpy() -> None:
    probe = (
        "import sys, bagpipe.cli.main as cli\n"
        "code = cli.main(['schedule', 'prefetch', '--format', 'csv'])\n"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numpy', 'redis')))"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=250, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("#resource=data,")


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = [sys.executable, "-m", "bagpipe", "schedule", "prefetch", "--batches", "3000", "--format", "csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


@pytest.mark.parametrize("cost", ["99F=1", "00F=1", "7F2=1"])
def test_costs_of_stages_that_do_not_exist_are_refused(cost: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--cost", cost]) == 2
    assert f"--cost: {cost.partition('=')[0]} names stage" in capsys.readouterr().err


def test_a_grid_of_very_different_durations_stays_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--cost", "F=1e-9,B=1e9"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 21_000
