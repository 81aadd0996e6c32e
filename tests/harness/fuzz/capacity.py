"""A program: the most distinct rows that must be in a cache at a time, and the number of all rows of a job, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from bagpipe.config.load import parse_config
from bagpipe.errors import InputError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import Phase
from bagpipe.util.program import run_program
from cacher.planning import PlannedData
from trainer.assembly import build_training_model

__all__ = ["main"]


def main() -> None:
    """Run the program and exit with its code."""
    sys.exit(run_program(_capacity))


def _capacity(argv: Sequence[str]) -> int:
    config = parse_config(argv, "capacity").config
    source = PlannedData(config.data, config.run.seed)
    built = build_training_model(config, source.schema)
    rows: list[set[int]] = [set() for _ in built.rows.tables]
    largest = 1
    specs: dict[Phase, OracleSpec] = {"train": built.spec}
    if config.data.has_evaluation:
        specs["eval"] = built.eval_spec
    for phase, spec in specs.items():
        direct = dataclasses.replace(spec, num_slots=0)
        steps = config.run.steps if phase == "train" else 0
        with suppress(InputError):  # bad data behind the place where eval.patience ends the job
            for rank_batch in source.batches(phase, direct, max_steps=steps):
                unique = rank_batch.consumer.unique
                largest = max(largest, len(unique) * (1 + spec.rows_delay))  # a delay keeps two batches
                for known, ids in zip(rows, np.split(unique.ids, unique.table_offsets[1:-1]), strict=True):
                    known.update(ids.tolist())
    sys.stdout.write(json.dumps({"largest": largest, "total": sum(map(len, rows))}))
    return 0
