"""A program with `TrainPipeline` as torchrun starts it: its end, its exit code, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.programs import ROOT, Done, Program, await_gone

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

_PROGRAM = """
import os
import sys

from tests.train_pipeline.rank_jobs import made, shard
from tests.train_pipeline.small import state_of


def main(mode):
    rank = int(os.environ["RANK"])
    trained = made(planner="process")
    if mode == "with a block":
        with trained:
            train(trained, rank, mode)
    else:
        train(trained, rank, mode)
        trained.close()


def train(trained, rank, mode):
    for _ in trained.train(shard(rank)):
        if trained.step == 5:
            list(trained.evaluate(shard(rank, 3 + rank, seed=9)))
            if mode != "works" and rank == 1:
                raise LookupError("in the loop")
    total = sum(float(value.sum()) for value in state_of(trained).values())
    print(f"<{rank} {trained.step} {total!r}>", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
"""


def _run(folder: Path, mode: str) -> Done:
    script = folder / "program.py"
    script.write_text(_PROGRAM)
    arguments = ["--nproc-per-node=2", str(script), mode]
    with Program(arguments, {"PYTHONPATH": str(ROOT)}, module="torch.distributed.run") as program:
        done = program.finish()
    await_gone(done.mark)
    return done


@pytest.mark.slow  # tests/docs/test_readme.py ends such a program, test_ranks.py has its numbers
def test_a_program_ends_well_on_all_ranks(tmp_path: Path) -> None:
    done = _run(tmp_path, "works")
    assert done.code == 0, done.err
    found = sorted(line[1:-1].split() for line in done.out.replace("><", ">\n<").splitlines())
    assert [(rank, step) for rank, step, _ in found] == [("0", "12"), ("1", "12")]
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("mode", ["without", pytest.param("with a block", marks=pytest.mark.slow)])
def test_an_error_of_one_rank_ends_the_program(mode: str, tmp_path: Path) -> None:
    done = _run(tmp_path, mode)
    assert done.code == 1
    assert "LookupError: in the loop" in done.err
    assert done.out == ""
