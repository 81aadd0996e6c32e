"""A program: how far an exported checkpoint is from a plain PyTorch loop over the same data.

flags ──data.loader──> batches ──tests.system.reference, torch alone──> parameters, rows, optimizer state ─┐
--export FOLDER: model.safetensors, optimizer.safetensors ─────────────────────────────────────────────────┴─> the
largest difference, as JSON on standard output: absolute, and relative for numbers beyond 1
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from bagpipe.config.load import Option, parse_config
from bagpipe.config.optim_section import OptimConfig
from bagpipe.config.sections import Config
from bagpipe.rates import Schedule
from bagpipe.util.program import run_program
from data.formats import open_source
from tests.system.plain_jobs import all_batches, plain_batch, plain_tables
from tests.system.plain_rows import STATES, PlainRows
from tests.system.reference import MakeScheduler, PlainTable, Trained, plain_training, row_state
from trainer.assembly import build_training_model
from trainer.dense import loss_of
from trainer.optimizers import dense_optimizer, rate_schedule, rows_rate_schedule

__all__ = ["main"]

#: Row optimizers that torch and torchrec have.
_THEIRS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def main() -> None:
    """Run the program and exit with its code."""
    sys.exit(run_program(_compare))


def _compare(argv: Sequence[str]) -> int:
    line = parse_config(argv, "plain_loop", (Option(flag="--export", help="an exported checkpoint", metavar="FOLDER"),))
    folder = Path(line.options["export"])
    weights, states = load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")
    trained = _train(line.config)
    differences = {
        name: ((found - expected).abs() / expected.abs().clamp(min=1)).max().item()
        for name, found, expected in _pairs(trained, line.config, weights, states)
        if found.numel()
    }
    worst = max(differences, key=lambda name: differences[name])
    sys.stdout.write(json.dumps({"worst": worst, "difference": differences[worst]}))
    return 0


def _train(config: Config) -> Trained:
    built = build_training_model(config, open_source(config.data, config.run.seed).schema)
    read = all_batches(config)[: config.run.steps or None]
    batches = [plain_batch(batch, built.data) for batch in read]
    epochs = [batch.reader_state["epoch"] if batch.reader_state else 0 for batch in read]
    model, optim, loss = config.model, config.optim, loss_of(config.model, built.data)
    return plain_training(
        "factory" if model.factory else model.name,
        plain_tables(built, batches, config.run.dtype),
        batches,
        dict(built.converted.model.named_parameters()),
        dim=model.embedding_dim,
        bottom=model.bottom_mlp,
        top=model.top_mlp,
        rows=optim.rows,
        rows_lr=optim.rows_lr,
        dense=optim.dense,
        dense_lr=optim.dense_lr,
        eps=optim.eps,
        loss_of=lambda logits, labels: loss.summed(logits, labels) / len(labels),
        before_steps=lambda tables, dense: _clip(optim, tables, dense),
        make_dense=lambda parameters: dense_optimizer(
            parameters, optim, frozenset(p for p in parameters if p.dim() < 2 and optim.weight_decay_exempt)
        ),
        make_rows=None
        if optim.rows in _THEIRS and not optim.rows_weight_decay
        else lambda tables: _rows_optimizer(tables, optim),
        schedulers=[_scheduler(schedule, epochs) for schedule in (rows_rate_schedule(optim), rate_schedule(optim))],
    )


def _rule(config: Config) -> str:
    return "adam" if config.optim.rows == "adamw" else config.optim.rows


def _rows_optimizer(tables: Sequence[Parameter], optim: OptimConfig) -> PlainRows:
    return PlainRows(
        tables,
        name="adam" if optim.rows == "adamw" else optim.rows,
        lr=optim.rows_lr,
        decay=optim.rows_weight_decay,
        decoupled=optim.rows_decay_kind == "decoupled",
        eps=optim.eps,
        momentum=optim.rows_momentum,
        beta=optim.ftrl_beta,
        l1=optim.ftrl_l1,
        l2=optim.ftrl_l2,
    )


def _clip(optim: OptimConfig, tables: Sequence[Parameter], dense: Sequence[Parameter]) -> None:
    """Limits gradients; those of rows can be sparse."""
    if optim.clip_value:
        torch.nn.utils.clip_grad_value_(dense, optim.clip_value)
    clipped = {"dense": dense, "rows": tables, "all": [*tables, *dense]}[optim.clip_scope]
    gradients = [parameter.grad for parameter in clipped if parameter.grad is not None]
    if not optim.clip_norm or not gradients:
        return
    values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    norm = torch.stack([torch.linalg.vector_norm(each) for each in values]).square().sum().sqrt()
    for gradient in gradients:
        gradient.mul_(torch.clamp(optim.clip_norm / (norm + 1e-6), max=1.0))


def _scheduler(schedule: Schedule, epochs: Sequence[int]) -> MakeScheduler:
    """Follows a schedule in torch's way, over batches of these epochs."""
    factors = [schedule.factor(step, epoch) for step, epoch in enumerate(epochs)]
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: [*factors, 0.0][step])


def _pairs(
    trained: Trained, config: Config, weights: Mapping[str, Tensor], states: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, exported and plain value of every weight and state.

    Raises:
        AssertionError: they do not have the same names or rows.
    """
    tables = {id(module.weight) for module in trained.tables.rows}
    dense = [(name, value) for name, value in trained.model.named_parameters() if id(value) not in tables]
    plain_states = trained.dense.state_dict()["state"]
    for number, (name, value) in enumerate(dense):
        yield name, weights[name], value.detach()
        for state, expected in plain_states.get(number, {}).items():
            if f"{name}.{state}" in states and expected.shape == value.shape:
                yield f"{name}.{state}", states[f"{name}.{state}"], expected
    for number, table in enumerate(trained.tables.tables):
        yield from _rows(table, row_state(trained, _rule(config), number), config, weights, states)


def _rows(
    table: PlainTable, records: Tensor, config: Config, weights: Mapping[str, Tensor], states: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    (name,) = [name for name in weights if name.endswith(f".{table.name}.weight")]
    ids = torch.from_numpy(table.ids)
    place = ids
    if f"{name.removesuffix('weight')}ids" in weights:
        stored = weights[f"{name.removesuffix('weight')}ids"]
        assert torch.equal(stored, ids), f"{name}: rows of the plain loop and of the checkpoint differ"
        place = torch.arange(len(ids))
    parts = [weights[name], *(states[f"{name}.{state}"] for state in STATES[_rule(config)])]
    found = torch.cat([part[place].reshape(len(ids), part.shape[1:].numel()) for part in parts], dim=1)
    yield name, found, records
