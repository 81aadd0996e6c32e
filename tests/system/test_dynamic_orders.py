"""Jobs whose ranks choose their order: the bits of a static schedule, and orders that other jobs repeat."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.system.programs import Done, await_gone, run_forked, torchrun
from tests.system.test_torchrun import JOB

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

STAGES = [*JOB, "--data.limit", "1200", "--pipeline.stages", "2", "--pipeline.microbatches", "4"]


def run(folder: Path, ranks: int, schedule: str, *flags: str) -> Done:
    arguments = [*STAGES, "--pipeline.schedule", schedule, "--result", str(folder / "result.json"), *flags]
    if ranks == 1:
        return run_forked(arguments, folder)
    with torchrun(arguments, ranks=ranks, forked=folder) as program:
        done = program.finish()
    await_gone(done.mark)
    return done


def result(folder: Path, ranks: int, schedule: str, *flags: str) -> list[Any]:
    done = run(folder, ranks, schedule, *flags)
    assert done.code == 0, done.err
    found = json.loads((folder / "result.json").read_text())
    return [found[name] for name in ("steps", "loss", "dense_digest", "embedding_digest", "auc")]


def test_ranks_of_unlike_stages_choose_and_repeat(tmp_path: Path) -> None:
    """Three ranks choose; one process repeats their order, and records the same one."""
    first, again = tmp_path / "first", tmp_path / "again"
    parts = ["--pipeline.replicas", "2,1"]
    expected = result(tmp_path, 1, "1f1b", *parts)
    assert result(tmp_path, 3, "dynamic", *parts, "--pipeline.record", str(first)) == expected
    assert result(tmp_path, 1, "dynamic", *parts, "--pipeline.replay", str(first), "--pipeline.record", str(again)) == (
        expected
    )
    assert again.read_text() == first.read_text()
    header = first.read_text().splitlines()[0]
    assert header.startswith("# bagpipe orders 1: stages 2, ranks 2,1, microbatches 4, replicas 1, model ")


def test_orders_of_ranks_are_repeated_in_any_placement(tmp_path: Path) -> None:
    """Two ranks choose; two threads repeat their order, and record the same one."""
    first, again = tmp_path / "first", tmp_path / "again"
    expected = result(tmp_path, 1, "1f1b")
    assert result(tmp_path, 1, "gpipe") == expected
    assert result(tmp_path, 1, "dynamic", "--cache.rows", "0") == expected
    limit = ["--pipeline.in_flight", "3"]
    assert result(tmp_path, 2, "dynamic", *limit, "--pipeline.record", str(first)) == expected
    repeats = ["--pipeline.replay", str(first), "--pipeline.record", str(again)]
    assert result(tmp_path, 1, "dynamic", *limit, *repeats) == expected
    assert again.read_text() == first.read_text()
    lines = first.read_text().splitlines()
    assert re.fullmatch(r"# bagpipe orders 1: stages 2, microbatches 4, replicas 1, model [0-9a-f]{16}", lines[0])
    assert len(lines) == 1 + 2 * expected[0]
    # Fewer orders than batches, and another job's.
    first.write_text("\n".join(lines[:7]) + "\n")
    done = run(tmp_path, 1, "dynamic", *limit, *repeats)
    message = f"error: pipeline.replay {first}: it has no order of batch 3; its last one is of batch 2"
    assert (done.code, done.error_line) == (2, message)
    done = run(tmp_path, 1, "dynamic", *limit, *repeats, "--pipeline.microbatches", "2")
    assert done.code == 2
    assert done.error_line.startswith(f"error: pipeline.replay {first}: expected orders of this job, '# bagpipe")
