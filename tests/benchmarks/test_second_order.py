"""Contestants, jobs, formulas and tables of benchmarks/second_order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bagpipe.config.load import parse_config
from bagpipe.testing.local_peers import LocalPeers
from benchmarks.harness.benchmark import run_benchmark
from benchmarks.second_order.contestants import ADAGRAD, CONTESTANTS, NUM_TRIES, VARIANTS
from benchmarks.second_order.job import measure
from benchmarks.second_order.main import BENCHMARK
from benchmarks.second_order.meter import CountedGroup
from benchmarks.second_order.quality import DATA, JOB, Run, chosen, flags_of, rank_runs, runs, tries
from benchmarks.second_order.report import reached
from benchmarks.second_order.shapes import SHAPES, bert_base, resnet50
from benchmarks.second_order.steps import MODELS, step_jobs
from benchmarks.second_order.steps import flags_of as step_flags_of
from tests.distributed.threads import run_threads


def test_every_contestant_has_as_many_tries() -> None:
    for contestant in CONTESTANTS.values():
        assert len({tuple(settings.items()) for settings in contestant.tries}) == NUM_TRIES
    for data in DATA.values():
        assert len(list(tries(data))) == NUM_TRIES * len(CONTESTANTS) * data.try_seeds


def test_the_settings_with_the_least_mean_over_seeds_are_chosen() -> None:
    """The second settings win although the first have the best job; the third have a job that failed."""
    ends = [(0.5, 0.9, 0.9), (0.7, 0.7, 0.7), (0.1, 0.1)] + [(1.0, 1.0, 1.0)] * (NUM_TRIES - 3)
    tried = [
        (Run(name=name, settings=settings, seed=seed, is_try=True), {"scores": [{"ne": ne}]})
        for name, contestant in CONTESTANTS.items()
        for settings, nes in zip(contestant.tries, ends, strict=True)
        for seed, ne in enumerate(nes)
    ]
    settings = chosen(tried)
    assert settings == {name: contestant.tries[1] for name, contestant in CONTESTANTS.items()}
    found = list(runs(settings, 2))
    assert len(found) == 2 * (len(CONTESTANTS) + len(VARIANTS))
    assert 0 not in {run.seed for run in found}
    assert {run.factors for run in rank_runs(settings, 1) if run.name != ADAGRAD} == {"summed", "local"}


def test_flags_are_those_of_valid_jobs() -> None:
    settings = {name: contestant.tries[0] for name, contestant in CONTESTANTS.items()}
    for run in (*tries(DATA["sample"]), *runs(settings, 1), *rank_runs(settings, 1)):
        config = parse_config(flags_of(run, DATA["sample"], 80_000), "test", ()).config
        assert config.optim.rows == "adagrad"
        assert config.eval.every == (0 if run.is_try else 7)
    for job in step_jobs(list(MODELS)):
        parse_config(step_flags_of(job, 512), "test", ())


def test_the_target_is_reached_at_the_first_evaluation_that_has_it() -> None:
    scores = [
        {"step": n, "ne": ne, "wall_s": n + 0.5, "processor_s": n / 2} for n, ne in ((1, 1.0), (2, 0.8), (3, 0.7))
    ]
    assert reached(scores, 0.8) == (2 * 512, 2.5, 1.0)
    assert reached(scores, 0.6) is None


def test_a_job_tells_its_scores_times_and_bytes() -> None:
    flags = [
        *JOB, "--store.url", "memory://", "--data.limit", "1600", "--data.batch_size", "32", "--eval.every", "20",
        *CONTESTANTS["kfac-sgd"].flags_of(CONTESTANTS["kfac-sgd"].tries[0]),
    ]  # fmt: skip
    found = measure(flags)
    assert found["steps"] == 45
    assert [score["step"] for score in found["scores"]] == [20, 40, 45]
    for key in ("processor_s", "wall_s"):
        times = [score[key] for score in found["scores"]]
        assert 0 < times[0] < times[1] < times[2]
    assert found["processor_s"] > 0
    assert found["kfac"]["layers"] == [(each.num_inputs, each.num_outputs) for each in SHAPES["small"]]
    assert found["kfac"]["kept_bytes"] == sum(2 * 4 * each.factor_elements for each in SHAPES["small"])
    assert found["kfac"]["sent_bytes"] == 0


def test_bytes_to_other_ranks_are_counted() -> None:
    def work(peers: LocalPeers) -> int:
        (group,) = peers.open_stage_groups([range(3)]).values()
        counted = CountedGroup(group)
        counted.all_to_all(torch.empty(3), torch.zeros(3), [1, 1, 1], [1, 1, 1])
        counted.all_gather(torch.empty(6), torch.zeros(2))
        counted.broadcast(torch.zeros(5), root=1)
        return counted.sent_bytes

    sent = [ended.value for ended in run_threads(3, work)]
    assert sent == [4 * (2 + 4), 4 * (2 + 4 + 10), 4 * (2 + 4)]


def test_shapes_are_those_of_the_models() -> None:
    assert sum(layer.weights for layer in resnet50()) == 25_503_912  # torchvision's, without its norms
    assert sum(layer.weights for layer in bert_base()) == 12 * (4 * 768 * 769 + 768 * 3072 * 2 + 3072 + 768)


def test_tables_of_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads((BENCHMARK.folder / "results.json").read_text())
    for record in values["parts"]["steps"]["found"]:
        if layers := record["kfac"].get("layers"):
            own = SHAPES[record["job"]["model"]]
            assert layers == [[each.num_inputs, each.num_outputs] for each in own]
    (tmp_path / "results.json").write_text(json.dumps(values))
    assert run_benchmark(BENCHMARK, ["--report", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "kfac 1/10, local" in text
    assert "not reached" in text or "reached Adagrad's NE" in text
