from __future__ import annotations

import pytest

from bagpipe.schedule.ir.ops import OPS, TORCH_OPS


def test_torch_ops_are_those_of_its_pipelining_csv() -> None:
    assert set("FBIW") | {
        "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B"
    } == TORCH_OPS  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(OPS) - TORCH_OPS))
def test_extension_names_cannot_be_misread_as_a_torch_op(name: str) -> None:
    assert not name.startswith(tuple(TORCH_OPS)), "torch's parser reads only a prefix"


def test_second_order_work_counts_micro_batches_layers_and_batches() -> None:
    units = {name: OPS[name].unit for name in ("COV_A", "COV_G", "X_INV", "REDUCE_COV", "PRECOND", "X_BCAST", "X_KL")}
    assert list(units.values()) == ["micro", "micro", "layer", *4 * ["batch"]]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_op_is_described_and_provides_known_ops(op: object) -> None:
    entry = OPS[op.name]  # type: ignore[attr-defined]
    assert entry.meaning
    assert "\n" not in entry.meaning
    assert all(provided in OPS for provided in entry.provides)
