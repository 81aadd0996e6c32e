"""The table of operations: every op of an action, its unit and its meaning. An entry of `OPS` adds an op.

Compute and communication ops have PyTorch's names (torch.distributed.pipelining), so dense programs can be exchanged
with it. Names of extension ops do not begin with F, B, I or W: PyTorch's parser reads a prefix only, and would take
``0FETCH1`` for a forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["OPS", "TORCH_OPS", "Op", "Role", "Unit"]

#: What an action's index counts: micro-batches of the stage, batches, gathers of the stage's parameters, or layers of
#: the stage whose gradients are preconditioned.
Unit = Literal["micro", "batch", "gather", "layer"]

#: Kind of work. Checks and renderers use the role, not lists of names.
Role = Literal[
    "forward", "backward", "input_grad", "weight_grad", "overlap", "send", "recv", "weights", "rows", "other"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        name: as written in an action's text.
        unit: what the index of its actions counts.
        role: kind of work.
        meaning: one line.
        torch: PyTorch's pipelining CSV has the op.
        index_optional: the text can omit the index, as PyTorch's weight actions do.
        peer: the text names the stage at the other end of an edge, ``0SENDX_F1:3``.
        provides: ops that this one includes: a full backward is both halves, and satisfies dependencies on them.
        cost: default duration in the simulator: the convention of the zero-bubble papers (F=I=W=1, B=2, free
            communication), and 1 on other resources.
    """

    name: str
    unit: Unit
    role: Role
    meaning: str
    torch: bool = False
    index_optional: bool = False
    peer: bool = False
    provides: tuple[str, ...] = ()
    cost: int = 1


def _table(*ops: Op) -> Mapping[str, Op]:
    return {op.name: op for op in ops}


def _torch(name: str, role: Role, meaning: str, cost: int) -> Op:
    return Op(name=name, unit="micro", role=role, meaning=meaning, torch=True, cost=cost)


def _weights(name: str, meaning: str) -> Op:
    return Op(name=name, unit="batch", role="weights", meaning=meaning, torch=True, index_optional=True, cost=0)


def _gather(name: str, meaning: str) -> Op:
    return Op(name=name, unit="gather", role="weights", meaning=meaning, torch=True, index_optional=True, cost=0)


def _exchange(name: str, meaning: str) -> Op:
    return Op(name=name, unit="batch", role="other", meaning=meaning, cost=0)


def _edge(name: str, role: Role, meaning: str) -> Op:
    return Op(name=name, unit="micro", role=role, meaning=meaning, peer=True, cost=0)


def _rows(name: str, meaning: str) -> Op:
    return Op(name=name, unit="batch", role="rows", meaning=meaning)


OPS: Mapping[str, Op] = _table(
    _torch("F", "forward", "forward of one micro-batch through the stage", 1),
    Op(
        name="B",
        unit="micro",
        role="backward",
        meaning="full backward: gradients of inputs and weights",
        torch=True,
        provides=("I", "W"),
        cost=2,
    ),
    _torch("I", "input_grad", "backward, input-gradient half", 1),
    _torch("W", "weight_grad", "backward, weight-gradient half", 1),
    _torch("OVERLAP_F_B", "overlap", "a forward and a backward executed as one action", 0),
    _torch("SEND_F", "send", "send the stage's output to the next stage", 0),
    _torch("RECV_F", "recv", "receive the stage's input from the previous stage", 0),
    _torch("SEND_B", "send", "send the stage's input gradient to the previous stage", 0),
    _torch("RECV_B", "recv", "receive the stage's output gradient from the next stage", 0),
    _gather("UNSHARD", "gather the stage's sharded parameters"),
    _gather("RESHARD", "drop the gathered parameters"),
    _weights("REDUCE_GRAD", "reduce the stage's gradients over replicas"),
    _edge("SENDX_F", "send", "send an output along one edge of a DAG"),
    _edge("RECVX_F", "recv", "receive an input along one edge of a DAG"),
    _edge("SENDX_B", "send", "send a gradient along one edge of a DAG"),
    _edge("RECVX_B", "recv", "receive a gradient along one edge"),
    Op(name="REC", unit="micro", role="other", meaning="recompute the stage's activations before its backward"),
    Op(name="OPT", unit="batch", role="weights", meaning="dense optimizer step of the stage"),
    Op(name="PRED", unit="batch", role="weights", meaning="predict the stage's weights for the batch's forwards"),
    Op(name="PRED_B", unit="batch", role="weights", meaning="predict the stage's weights for the batch's backwards"),
    Op(
        name="COV_A",
        unit="micro",
        role="other",
        meaning="add the micro-batch's input covariances to the factors (K-FAC)",
    ),
    Op(
        name="COV_G",
        unit="micro",
        role="other",
        meaning="add the micro-batch's output-gradient covariances to the factors (K-FAC)",
    ),
    _exchange("REDUCE_COV", "sum the factors over the holders of the stage (K-FAC)"),
    Op(name="X_INV", unit="layer", role="other", meaning="invert the factors of one layer of the stage (K-FAC)"),
    Op(name="PRECOND", unit="batch", role="other", meaning="precondition the stage's gradients (K-FAC)"),
    _exchange("X_BCAST", "broadcast preconditioned gradients from their layers' owners to the other holders (K-FAC)"),
    Op(
        name="X_MEASURE",
        unit="batch",
        role="other",
        meaning="examine and measure the stage's gradients before any stage steps",
        cost=0,
    ),
    _exchange("X_AGREE", "all stages of all ranks agree on the batch: that it is finite, and its gradients' norm"),
    _exchange("X_KL", "the size of the step over all stages, which kappa limits (K-FAC)"),
    Op(name="USE", unit="micro", role="other", meaning="a moment of a batch that uses chunks of the dense part"),
    Op(name="CHUNK_IN", unit="micro", role="other", meaning="a chunk of the dense part comes to the device"),
    Op(name="CHUNK_OUT", unit="micro", role="other", meaning="a chunk of the dense part leaves the device"),
    _rows("X_READ", "take the next batch and its cache plan"),
    _rows("X_PLAN", "decide fetches, evictions and slots of a batch: the cacher's work, in traces only"),
    _rows("X_FETCH", "fetch rows missing from the cache: store to staging"),
    _rows("X_EVICT", "read leaving rows out of their slots: cache to staging"),
    _rows("X_INSERT", "insert fetched rows: staging to cache slots"),
    _rows("X_PREPULL", "get the rows that the previous batch does not touch from their owners on other ranks"),
    _rows("X_PULL", "get the other rows of the batch from their owners on other ranks"),
    _rows("X_EMBED", "pool the batch's rows into vectors for the dense stages; hand out dense inputs and labels"),
    _rows("X_EMBED_GRAD", "turn the vectors' gradients of all micro-batches into row gradients"),
    _rows("X_PUSH", "give gradients of rows that the next batch uses to their owners on other ranks"),
    _rows("X_PUSH_LATE", "give the other row gradients to their owners on other ranks"),
    Op(name="X_TURN", unit="batch", role="other", meaning="begin the batch's turn: its dense steps may follow", cost=0),
    _rows("X_NORM", "add up the squared gradients of the batch's rows, of all ranks, where their norm is limited"),
    _rows("X_UPDATE", "one row-optimizer step for every row of the batch, or for the rows that X_PUSH brought"),
    _rows("X_UPDATE_LATE", "one row-optimizer step for the rows that X_PUSH_LATE brought"),
    _rows("X_WRITEBACK", "write leaving rows back and wait for the store's acknowledgement"),
    _rows("X_ACK", "every rank's X_WRITEBACK of the batch is acknowledged"),
)

#: Names that PyTorch's parser knows.
TORCH_OPS = frozenset(op.name for op in OPS.values() if op.torch)
