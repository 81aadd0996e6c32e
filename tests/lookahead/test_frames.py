"""Specs, errors and parts as frames."""

from __future__ import annotations

import pytest
from hypothesis import given

from bagpipe.errors import CapacityError, InputError, ScheduleError
from bagpipe.lookahead.frames import FramedPlan, decode_error, decode_spec, encode_error, encode_spec
from bagpipe.lookahead.inline import InlinePlanner
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.batch import Batch
from tests.lookahead.streams import expected_parts, plain_part
from tests.oracle.batches import traces


@given(traces())
def test_a_spec_comes_back(trace: tuple[OracleSpec, list[Batch]]) -> None:
    assert decode_spec(bytearray(encode_spec(trace[0]))) == trace[0]


@pytest.mark.parametrize(
    ("error", "back"),
    [(InputError("ä"), InputError), (CapacityError("x"), CapacityError), (ScheduleError("x"), InputError)],
)
def test_an_error_comes_back(error: InputError, back: type[InputError]) -> None:
    decoded = decode_error(bytearray(encode_error(error)))
    assert (type(decoded), str(decoded)) == (back, str(error))


@given(traces(max_batches=4))
def test_a_framed_plan_has_the_same_parts(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    for rank in range(spec.world_size):
        found = []
        with InlinePlanner(spec) as planner:
            for batch, plan in zip(batches, planner.plan_all(batches, 0, lambda batch: None), strict=True):
                framed = FramedPlan(parts=tuple(bytearray().join(plan.frame(r)) for r in range(spec.world_size)))
                assert framed.frame(rank) == [framed.parts[rank]]
                part = framed.part(rank, batch)
                assert part.batch is batch
                found.append(plain_part(part))
        assert found == expected_parts(batches, spec, rank)
