"""`layers_at`: where the linear layers of a pipeline's stages are computed, for `Preconditioning`."""

from __future__ import annotations

from collections.abc import Container, Sequence

from bagpipe.dense.precondition.layers import linear_layers
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.training.preconditioning import LayersAt

__all__ = ["layers_at"]


def layers_at(pipeline: DensePipeline, runtime: StageRuntime, chunks: Container[str]) -> Sequence[LayersAt]:
    """The layers of each stage instance of a process. A second pipe's is a copy with gradients of its own.

    Args:
        pipeline: of the process.
        runtime: of the run.
        chunks: names of those whose layers are preconditioned.
    """
    names = {id(parameter): name for name, parameter in pipeline.staged.model.named_parameters()}
    step, process = pipeline.step, pipeline.process
    lanes = [step.program.lanes.get(lane, ()) for lane in (*step.lanes_of(process), f"reduce{process}")]
    atoms = [atom for lane in lanes for action in lane for atom in action.atoms]
    found: list[LayersAt] = []
    for instance in step.instances:
        if instance.process == process and str(instance.stage) in chunks:
            module, original = runtime.runner(instance.number).module, pipeline.staged.stages[instance.stage].module
            twins = zip(module.parameters(), original.parameters(), strict=True)
            layers = linear_layers(module, {id(twin): names[id(parameter)] for twin, parameter in twins})
            place = LayersAt(
                prefix=str(instance.number),
                chunk=str(instance.stage),
                layers=layers,
                micro_per_batch=step.program.micro_per_batch[instance.number],
                ops=frozenset(atom.op for atom in atoms if atom.stage == instance.number),
                inversions_per_batch=len(layers),
            )
            found.append(place)
    return found
