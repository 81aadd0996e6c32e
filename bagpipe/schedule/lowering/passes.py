"""Every lowering pass by name. `step_program` composes the same passes for training.

flatten-pipes ─> recompute ─> embedding ─> reduce-grad ─> optimizer ─┬─> unshard | gathers ─┬─> sends ─> defer-receives
                                                                     └─> precondition ──────┘     └─> separate-receives
merge-input-weight, unshard-reshard: for tables exchanged with PyTorch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.lowering.embedding import add_embedding
from bagpipe.schedule.lowering.gathers import add_gathers
from bagpipe.schedule.lowering.optimizer import add_optimizer, add_reduce_grad, add_unshard
from bagpipe.schedule.lowering.precondition import Preconditioning, add_preconditioning
from bagpipe.schedule.lowering.receives import separate_receives
from bagpipe.schedule.lowering.recompute import add_recompute
from bagpipe.schedule.lowering.rewrite import add_unshard_reshard, flatten_pipes, merge_input_weight
from bagpipe.schedule.lowering.sends import add_sends, defer_receives

__all__ = ["PASSES", "Pass"]

#: (program, lane -> the process that runs it) -> program.
Pass = Callable[[Program, Mapping[str, int]], Program]


def _one_layer_per_stage(program: Program) -> Preconditioning:
    trained = {atom.stage for atom in program.atoms() if atom.op in ("B", "W")}
    return Preconditioning(layers={s.parameters: 1 for s in program.stages if s.number in trained})


PASSES: Mapping[str, Pass] = {
    "flatten-pipes": lambda program, home: flatten_pipes(program),
    "recompute": lambda program, home: add_recompute(program, {stage.number: 1.0 for stage in program.stages}),
    "embedding": add_embedding,
    "reduce-grad": add_reduce_grad,
    "optimizer": add_optimizer,
    "unshard": add_unshard,
    "gathers": add_gathers,
    "precondition": lambda program, home: add_preconditioning(program, home, _one_layer_per_stage(program)),
    "sends": add_sends,
    "defer-receives": defer_receives,
    "separate-receives": separate_receives,
    "merge-input-weight": lambda program, home: merge_input_weight(program),
    "unshard-reshard": lambda program, home: add_unshard_reshard(program),
}
