from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from bagpipe.pipeline.stage.mesh import Mesh
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.step_program import step_program


def mesh_of(schedule: str, *, stages: int, processes: int, world_size: int) -> Mesh:
    step = step_program(chain(stages, 4), [(0, True)], schedule, num_processes=processes, replicas=world_size)
    return Mesh(step=step, world_size=world_size)


def test_one_process_holds_and_reads_everything() -> None:
    mesh = mesh_of("1f1b", stages=3, processes=1, world_size=1)
    assert mesh.example_shares == ()
    assert mesh.stages_of(0) == (0, 1, 2)
    assert mesh.holders(1) == (0,)
    assert mesh.examples(0, 10) == (0, 10)


def test_replicas_share_the_examples_and_hold_the_same_stages() -> None:
    mesh = mesh_of("1f1b", stages=2, processes=2, world_size=6)
    assert mesh.num_replicas == 3
    assert mesh.example_shares == (1, 0, 1, 0, 1, 0)
    assert [mesh.coordinates(rank) for rank in (0, 1, 5)] == [(0, 0), (0, 1), (2, 1)]
    assert mesh.holders(0) == (0, 2, 4)
    assert mesh.holders(1) == (1, 3, 5)
    assert [mesh.examples(replica, 10) for replica in range(3)] == [(0, 3), (3, 6), (6, 10)]


def test_the_two_pipes_of_chimera_begin_at_both_ends() -> None:
    mesh = mesh_of("chimera", stages=4, processes=4, world_size=8)
    assert mesh.example_shares == (1, 0, 0, 1, 1, 0, 0, 1)
    assert mesh.holders(0) == (0, 3, 4, 7)
    assert mesh.stages_of(2) == (1, 2)


def test_chimera_on_two_ranks_gives_both_equal_shares() -> None:
    mesh = mesh_of("chimera", stages=2, processes=2, world_size=2)
    assert mesh.example_shares == ()
    assert mesh.examples(0, 7) == (0, 7)


def test_ranks_must_be_whole_replicas() -> None:
    with pytest.raises(InputError, match="1f1b with 2 stages: the number of ranks must be 1 or a multiple of 2, got 3"):
        mesh_of("1f1b", stages=2, processes=2, world_size=3)
