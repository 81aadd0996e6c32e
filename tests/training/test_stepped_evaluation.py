"""Evaluation in steps: the caller's model, one batch at a time, in the caller's thread."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from bagpipe.config.sections import DataConfig
from bagpipe.dense.loss_executor import LossInputs
from bagpipe.testing.plain_job import PlainJob, PlainSettings, plan_rank_batches
from bagpipe.training.stepped_evaluation import Outputs
from data import open_loader, open_source

DATA = DataConfig(format="synthetic", limit=500, batch_size=100, workers=0, eval_fraction=0.0)


class _WithLoss(nn.Module):
    """The job's model as one that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        logits = self.model(inputs.dense, inputs.sparse).reshape(-1)
        return logits.mean(), (logits, threading.get_ident(), torch.is_grad_enabled())


def test_outputs_are_those_of_a_whole_evaluation() -> None:
    settings = PlainSettings(schema=open_source(DATA, seed=0).schema, cache_rows=9_000, lookahead=3)
    with PlainJob(settings) as job:
        with open_loader(DATA, seed=0) as loader:
            job.train(loader)
        with open_loader(DATA, seed=0) as loader:
            expected, _ = job.score(loader)
        prepare = job.engine.prepare
        job.engine.prepare = lambda batch, upload: LossInputs(
            batch=prepare(batch, upload), num_examples=batch.num_examples
        )
        outputs, seen = Outputs(_WithLoss(job.model)), []
        with open_loader(DATA, seed=0) as loader:
            with job.engine.evaluate_in_steps(plan_rank_batches(loader, job.spec), outputs) as run:
                while run.step() is not None:
                    seen.append(outputs.outputs)
                run.end()
    assert torch.equal(torch.cat([logits for logits, _, _ in seen]), expected)
    assert {(thread, grad) for _, thread, grad in seen} == {(threading.get_ident(), False)}
