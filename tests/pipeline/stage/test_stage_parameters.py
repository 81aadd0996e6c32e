"""Stages whose parameters are divided: bytes gathered and reduced per stage and batch, memory, and bits."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from bagpipe.dense.parallel.stage_shards import StageShards
from bagpipe.dense.parallel.stage_sums import StageSums
from bagpipe.errors import InputError
from bagpipe.pipeline.interpret import interpret
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.mesh import Mesh, held_stages
from bagpipe.schedule.lowering.step_program import step_program
from tests.distributed.threads import run_threads
from tests.pipeline.stage.steps import batch_of, loss_sum
from tests.split.models import make

MICRO, SIZE = 4, 16


def one_batch(peers: Any, schedule: str, chunks: int | None, active: int, level: str) -> dict[str, Any]:
    """Train one batch on replicas of one process: what each stage sent, what was whole at once, and final values."""
    staged = make("dropout")
    divided = level == "parameters"
    step = step_program(
        staged.graph(MICRO),
        staged.embedding_edges,
        schedule,
        chunks=chunks,
        replicas=peers.world_size,
        recompute=schedule == "gpipe",
        gathers=divided,
        active_stages=active,
    )
    mesh = Mesh(step=step, world_size=peers.world_size)
    held = held_stages(staged, mesh)
    groups = peers.open_stage_groups([stage.holders for stage in held])
    shares: Any = {}
    if divided:
        shares = StageShards(staged.model, held, groups, rank=peers.rank, level="parameters")
    sums = StageSums(held, groups, rank=peers.rank)
    pipeline = DensePipeline(
        staged=staged,
        mesh=mesh,
        rank=peers.rank,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        dtype=torch.float64,
        device=torch.device("cpu"),
        seed=5,
        reduce=sums.reduce,
        shares=shares,
    )
    whole = batch_of(0, SIZE)
    share = slice(SIZE * peers.rank // peers.world_size, SIZE * (peers.rank + 1) // peers.world_size)
    inputs = type(whole)(dense=whole.dense[share], sparse=whole.sparse[share], labels=whole.labels[share])
    runtime = pipeline.runtime(lambda b: pipeline.batch(inputs, SIZE), loss_sum)
    pipeline.parameters.begin(runtime)
    stage_of = {instance.number: instance.stage for instance in step.instances}
    trace: list[str] = []
    most_bytes = 0

    def reduce(stage: int, b: int) -> None:
        runtime.sum_pipes(stage)
        pipeline.reduce(stage, 0)

    def gather(stage: int, index: int) -> None:
        nonlocal most_bytes
        trace.append(f"U{stage}")
        pipeline.weights[stage].unshard(index)
        storages = [p.untyped_storage() for p in staged.model.parameters() if p.untyped_storage().nbytes() > 8]
        most_bytes = max(most_bytes, sum({s._cdata: s.nbytes() for s in storages}.values()))

    def optimize(stage: int, b: int) -> None:
        pipeline.weights[stage].step(b)

    def release(stage: int, index: int) -> None:
        trace.append(f"R{stage}")
        pipeline.weights[stage].reshard()

    embedding = step.embedding_stages[0].number
    handlers = {
        **runtime.handlers(),
        f"{embedding}X_EMBED": partial(runtime.embed, embedding),
        f"{embedding}X_EMBED_GRAD": partial(runtime.embed_grad, embedding),
    }
    ops = {"OPT": optimize, "REDUCE_GRAD": reduce, "UNSHARD": gather, "RESHARD": release}
    for atom in step.program.atoms():
        if atom.op in ops:
            handlers[f"{atom.stage}{atom.op}"] = partial(ops[atom.op], stage_of[atom.stage])
    interpret(step.program, handlers)
    sent = {stage: own.num_sent_bytes for stage, own in shares.items()}
    with pipeline.parameters.whole():
        values = {
            name: parameter.detach().numpy().tobytes()
            for stage in range(4)
            for name, parameter in staged.parameters_of(stage)
        }
    if divided:
        with pytest.raises(InputError, match="used outside the forward of its layer"):
            next(iter(staged.parameters_of(0)))[1].sum()
    pipeline.parameters.join()
    elements = {stage: sum(unit.layout.share for unit in own.shards) for stage, own in shares.items()}
    flags = {stage: sum(len(unit.names) + 1 for unit in own.shards) for stage, own in shares.items()}
    return {
        "sent": sent,
        "elements": elements,
        "flags": flags,
        "trace": trace,
        "most": most_bytes,
        "rows": next(staged.embedding.parameters()).grad,
        "values": values,
        "embedding": sum(p.nbytes for p in staged.embedding.parameters()),
    }


@pytest.mark.parametrize(
    ("schedule", "chunks", "active", "gathers"),
    [
        ("breadth-first", 4, 2, (2, 2, 1, 1)),
        ("breadth-first", 4, 1, (2, 2, 2, 1)),
        ("breadth-first", 4, 4, (1, 1, 1, 1)),
        ("interleaved", 2, 2, (1, 1, 1, 1)),
        ("gpipe", None, 2, (1, 1, 1, 1)),
        ("zb-h1", None, 1, (1, 1, 1, 1)),
        ("chimera", None, 1, (1, 1, 1, 1)),
    ],
)
def test_bytes_of_a_batch(schedule: str, chunks: int | None, active: int, gathers: tuple[int, ...]) -> None:
    """Each gather and each reduction of a stage sends every other rank its share, once."""
    ranks = 4 if (schedule, active) == ("breadth-first", 2) else 2
    ends = run_threads(ranks, one_batch, schedule, chunks, active, "parameters")
    plain = run_threads(ranks, one_batch, schedule, chunks, active, "none")
    assert [end.error for end in (*ends, *plain)] == [None] * 2 * ranks
    for end, other in zip(ends, plain, strict=True):
        found = end.value
        assert found["values"] == other.value["values"], "bits of the replicated stages"
        assert torch.equal(found["rows"], other.value["rows"])
        assert {text: found["trace"].count(text) for text in found["trace"]} == {
            **{f"U{stage}": count for stage, count in enumerate(gathers)},
            **{f"R{stage}": count for stage, count in enumerate(gathers)},
        }
        for stage, count in enumerate(gathers):
            share = 8 * found["elements"][stage]
            assert found["sent"][stage] == (ranks - 1) * ((count + 1) * share + 8 * found["flags"][stage])


def test_so_many_stages_are_whole_at_once() -> None:
    (end, _) = run_threads(2, one_batch, "breadth-first", 4, 1, "parameters")
    largest = max(end.value["elements"].values())
    assert end.value["most"] - end.value["embedding"] == 8 * 2 * largest, "one stage of four"
    assert Counter(each[0] for each in end.value["trace"]) == {"U": 7, "R": 7}


def test_a_view_of_a_released_parameter_is_found() -> None:
    def keeps(peers: Any) -> None:
        staged = make("chain2")
        kept = [parameter.detach() for _, parameter in staged.parameters_of(0)]
        step = step_program(staged.graph(1), staged.embedding_edges, "1f1b", replicas=2, gathers=True)
        held = held_stages(staged, Mesh(step=step, world_size=2))
        StageShards(staged.model, held, peers.open_stage_groups([(0, 1)]), rank=peers.rank, level="parameters")
        assert kept, "they live"

    for end in run_threads(2, keeps):
        assert end.error is not None
        assert end.error[0] == "InputError"
        assert "keeps a view of a parameter of layer" in end.error[1]
