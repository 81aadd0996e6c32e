"""Steps with arrays of every shape, for tests of the wire."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from bagpipe.batch import Batch
from bagpipe.client.step import PlanSpan, Step
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import plan_batches
from tests.oracle.batches import traces


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A step of a random trace, as the cacher makes it."""
    spec, batches = draw(traces(max_batches=4).filter(lambda trace: len(trace[1]) > 0))
    return draw(st.sampled_from(list(made(spec, batches))))


def made(spec: OracleSpec, batches: list[Batch]) -> list[Step]:
    span = PlanSpan(read_start_ns=1, plan_start_ns=2, plan_end_ns=3)
    return [
        Step(
            batch=batch,
            consumer=plan.consumers[0],
            owner=plan.owners[0],
            num_global_examples=batch.num_examples,
            span=span,
        )
        for batch, plan in plan_batches(batches, spec)
    ]


def arrays_of(record: object) -> list[np.ndarray]:
    """All arrays of a record and the records in it, in order."""
    found: list[np.ndarray] = []
    for name in record.__slots__ if hasattr(record, "__slots__") else ():
        value = getattr(record, name)
        found.extend([value] if isinstance(value, np.ndarray) else arrays_of(value))
    return found
