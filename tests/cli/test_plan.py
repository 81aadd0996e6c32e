from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bagpipe.cli.main import main
from bagpipe.cluster.cluster_file import to_toml
from bagpipe.partition.operators import OperatorGraph
from bagpipe.partition.plan_file import PlanFile
from tests.cluster.clusters import cluster, hosts
from tests.partition.graphs import graph, towers


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "towers.json"
    path.write_text(towers(3, 2).to_json(), encoding="utf-8")
    return str(path)


LINK = ["--link-bandwidth", "12.5GB", "--link-latency", "1e-5", "--memory", "16GiB", "--batch-size", "2048"]


def test_text(model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", model, "--devices", "4", *LINK]) == 0
    text = capsys.readouterr().out
    assert " ".join(text.splitlines()[0].split()) == "stage feeds replicas micro in flight F ms B ms MB operators"
    for start in ("schedule ", "step ", "bottleneck ", "one device ", "data parallel ", "chain, 1f1b "):
        assert any(line.startswith(start) for line in text.splitlines()), start
    assert "one device wins" not in text


def test_a_cluster(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["plan", "--model", model, "--batch-size", "2048", "--microbatches", "8", "--json"]
    assert main([*flags, "--cluster", "v100-paper", "--planner", "pipedream"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["devices"] <= 8
    assert answer["planner"] in ("pipedream", "whole")
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(cluster(hosts(1), hosts(1, "cpu"))), encoding="utf-8")
    assert main([*flags, "--cluster", str(path), "--devices", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] <= 3


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "expected --devices or --cluster, got neither"),
        (["--cluster", "v100-paper", "--memory", "1GB"], "--memory is not possible with --cluster, which says it"),
        (["--cluster", "v100-paper", "--devices", "9"], "expected a cluster with 9 devices, got 8 of '8 p3.2xlarge'"),
        (["--cluster", "nowhere"], "cluster: expected a .toml file or one of commodity, h200-hosts, v100-paper, got"),
        (["--devices", "2", "--planner", "magic"], "planner must be one of auto, graphpipe, pipedream, alpa, piper,"),
    ],
)
def test_flags_that_are_refused(model: str, flags: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", model, *flags]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_recomputation(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["plan", "--model", model, "--devices", "4", "--replicas", "none", "--batch-size", "4096"]
    flags += ["--microbatches", "4", "--memory", "480MB"]
    out = tmp_path / "plan.toml"
    assert main(flags) == 2
    capsys.readouterr()
    assert main([*flags, "--recompute", "--out", str(out)]) == 0
    assert "recompute " in capsys.readouterr().out
    assert any(stage.recompute for stage in PlanFile.from_toml(out.read_text(encoding="utf-8"), source="x").stages)


def test_divided_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Their plan is printed; `--out` says what jobs run."""
    path = tmp_path / "chain.json"
    path.write_text(towers(1, 4).to_json(), encoding="utf-8")
    flags = ["plan", "--model", str(path), "--devices", "4", "--batch-size", "64", "--link-bandwidth", "100GB"]
    flags += ["--link-latency", "1e-6", "--intra-operator"]
    assert main(flags) == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["splits", "operators"]
    assert " rows" in first
    assert main([*flags, "--out", str(tmp_path / "plan.toml")]) == 2
    error = capsys.readouterr().err
    assert "--out: stage 0: jobs divide every operator by examples (split batch), but the plan divides" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "plan.toml").exists()
    assert main([*flags, "--planner", "piper"]) == 2
    assert "intra_operator is possible with planner auto or alpa and without recompute" in capsys.readouterr().err


def test_json(model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", model, "--devices", "4", "--microbatches", "8", "--json", *LINK]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["batch_size"] == 2048
    assert {stage["microbatches"] for stage in answer["stages"]} <= {1, 8}
    assert answer["step_s"] < answer["one_device_step_s"]


def test_costs_of_the_stages_choose_an_order(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "costs.json"
    flags = ["--replicas", "none", "--microbatches", "8", "--json", "--save-costs", str(path)]
    assert main(["plan", "--model", model, "--devices", "4", *flags, *LINK]) == 0
    answer = json.loads(capsys.readouterr().out)
    costs = json.loads(path.read_text(encoding="utf-8"))
    edges = ",".join(f"{src}-{dst}" for src, dst in answer["edges"])
    for number, stage in enumerate(answer["stages"]):
        assert (costs[f"{number}F"], costs[f"{number}B"]) == (stage["forward_s"], stage["backward_s"])
        assert costs[f"{number}I"] + costs[f"{number}W"] == stage["backward_s"]
    stages = ["--stages", str(len(answer["stages"])), "--edges", edges, "--format", "json"]
    makespans = {}
    for name in ("zb-auto", "eager-1f1b"):
        assert main(["schedule", name, *stages, "--cost", str(path)]) == 0
        makespans[name] = json.loads(capsys.readouterr().out)["makespan"]
    assert makespans["zb-auto"] <= makespans["eager-1f1b"]
    assert main(["plan", "--model", model, "--devices", "4", "--save-costs", str(tmp_path)]) == 2
    assert "--save-costs: cannot write" in capsys.readouterr().err


def test_a_plan_is_written_for_a_job(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "plan.toml"
    flags = ["--replicas", "each", "--microbatches", "8", "--json", "--out", str(path)]
    assert main(["plan", "--model", model, "--devices", "4", *flags, *LINK]) == 0
    answer = json.loads(capsys.readouterr().out)
    written = PlanFile.from_toml(path.read_text(encoding="utf-8"), source="x")
    assert (written.schedule, written.batch_size) == (answer["schedule"], 2048)
    assert list(written.replicas) == [stage["replicas"] for stage in answer["stages"]]
    assert [list(stage.operators) for stage in written.stages] == [stage["operators"] for stage in answer["stages"]]
    assert main(["plan", "--model", model, "--devices", "4", "--out", str(tmp_path)]) == 2
    assert "--out: cannot write" in capsys.readouterr().err


def test_the_plan_says_when_one_device_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "small.json"
    path.write_text(graph(["ab"], {"a": 1e-9, "b": 1e-9}).to_json(), encoding="utf-8")
    assert main(["plan", "--model", str(path), "--devices", "4", "--link-latency", "1e-3"]) == 0
    assert capsys.readouterr().out.endswith("one device wins: no partition has a shorter step\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "0"], "devices must be at least 1, got 0"),
        (["--devices", "2", "--memory", "much"], "--memory: expected bytes such as 16e9, 16GB or 16GiB, got 'much'"),
        (["--devices", "2", "--memory", "1..2"], "--memory: expected bytes"),
        (["--devices", "2", "--link-bandwidth", "0"], "--link-bandwidth: expected more than 0 bytes, got '0'"),
        (["--devices", "2", "--link-latency", "-1"], "--link-latency: expected a number of at least 0, got '-1'"),
        (["--devices", "2", "--weight-copies", "nan"], "--weight-copies: expected a number of at least 0, got 'nan'"),
        (["--devices", "2", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (
            ["--devices", "2", "--microbatches", "2000"],
            "microbatches must be 1 to 1024, the examples of a batch, got 2000",
        ),
        (["--devices", "2", "--memory", "1MB"], "no partition over 2 devices with replicas=same fits 1e+06 bytes each"),
    ],
)
def test_bad_flags_are_one_line(model: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", model, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--devices", "two"], ["--devices", "2", "--replicas", "some"], ["--device", "2"]])
def test_argparse_errors_are_one_line(model: str, flags: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--model", model, *flags])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", str(tmp_path / "none.json"), "--devices", "2"]) == 2
    assert "--model: cannot read" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text('{"operators": [{"name": "a"}]}', encoding="utf-8")
    assert main(["plan", "--model", str(broken), "--devices", "2"]) == 2
    assert f"{broken}: operator 'a': forward_per_example_s is missing" in capsys.readouterr().err


def test_a_file_needs_no_torch(model: str):
    code = (
        "import sys\nfrom bagpipe.cli.main import main\n"
        f"assert main(['plan', '--model', {model!r}, '--devices', '2']) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_a_model_is_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "operators.json"
    flags = [
        "--model",
        "deepfm",
        "--devices",
        "2",
        "--batch-size",
        "8",
        "--columns",
        "3,2",
        "--save-operators",
        str(path),
    ]
    assert main(["plan", *flags, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    operators = OperatorGraph.from_json(path.read_text(encoding="utf-8"))
    names = [name for stage in answer["stages"] for name in stage["operators"]]
    assert sorted(names) == sorted(operator.name for operator in operators.operators)
    assert answer["step_s"] > 0
    assert main(["plan", "--model", str(path), "--devices", "2", "--batch-size", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer


def test_costs_of_a_device_that_is_not_at_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The H200 is several times as fast as the V100, by the same operators."""
    seconds = {}
    for preset in ("h200-hosts", "v100-paper"):
        out = tmp_path / f"{preset}.json"
        flags = ["--roofline", "float32", "--save-operators", str(out), "--batch-size", "4096", "--top-mlp", "512,256"]
        assert main(["plan", "--model", "dlrm", "--devices", "1", "--cluster", preset, *flags]) == 0
        graph = OperatorGraph.from_json(out.read_text(encoding="utf-8"))
        seconds[preset] = sum(each.forward.at(4096) for each in graph.operators)
    capsys.readouterr()
    assert 2 < seconds["v100-paper"] / seconds["h200-hosts"] < 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "resnet"], "model.name must be one of dlrm, "),
        (["--model", "nowhere:build"], "no module 'nowhere' on the path"),
        (["--model", "dlrm", "--columns", "13"], "--columns: expected 2 numbers with commas between, got '13'"),
        (["--model", "dlrm", "--bottom-mlp", "8,0"], "--bottom-mlp: expected widths of at least 1, got 0"),
        (["--model", "dlrm", "--embedding-dim", "0"], "--embedding-dim: expected widths of at least 1, got 0"),
        (["--model", "dlrm", "--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--model", "dlrm", "--roofline", "float32"], "--roofline: expected --cluster, whose first device counts"),
        (
            ["--model", "dlrm", "--cluster", "v100-paper", "--roofline", "float8"],
            "flops of float8: expected one of float32, float16",
        ),
        (["--model", "dlrm", "--top-mlp", "8,x"], "--top-mlp: expected numbers with commas between, got '8,x'"),
    ],
)
def test_bad_models(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--devices", "2", *flags]) == 2
    assert message in capsys.readouterr().err
