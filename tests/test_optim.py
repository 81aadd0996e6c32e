from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Frozen,
    Ftrl,
    Momentum,
    RowOptimizer,
    RowWiseAdagrad,
    optimizers_of,
    settings_of,
    shared_optimizer,
)
from bagpipe.types.schema import OPTIMIZER_STATE_WIDTH, base_optimizer

ADAPTIVE = (Adagrad, RowWiseAdagrad, Adam)
RATED = (SGD, Momentum, *ADAPTIVE)


def test_the_names_are_those_of_the_schema() -> None:
    plain = {kind(0.1).record for kind in (*RATED, Ftrl)} | {Frozen().record}
    decayed = {kind(0.1, weight_decay=0.1).record for kind in RATED} | {AdamW(0.1).record}
    l2 = {kind(0.1, weight_decay=0.1, decoupled=False).record for kind in RATED}
    assert l2 == {"sgd_decayed", "momentum_l2", "adagrad_l2", "rowwise_adagrad_l2", "adam_l2"}
    assert plain | decayed | l2 | {"ftrl_decayed", "ftrl_l2", "sgd_l2"} == set(OPTIMIZER_STATE_WIDTH)
    assert {record: base_optimizer(record) for record in decayed} == {
        record: (record.removesuffix("_decayed"), True) for record in decayed
    }


@pytest.mark.parametrize("kind", RATED)
@pytest.mark.parametrize("decay", [-0.1, math.nan, None])
def test_an_invalid_decay_is_refused(kind: Any, decay: Any) -> None:
    with pytest.raises(InputError, match=f"^{kind.__name__}: weight_decay must be a finite number of at least 0, got"):
        kind(0.1, weight_decay=decay)


def test_numbers_of_a_step() -> None:
    assert AdamW(0.1).numbers == {"weight_decay": 0.01}
    assert Momentum(0.1, weight_decay=0.5).numbers == {"weight_decay": 0.5, "momentum": 0.9}
    assert SGD(0.1).numbers == SGD(0.1, decoupled=False).numbers == {}
    assert Adam(0.1, weight_decay=0.5, decoupled=False).numbers == {"weight_decay": 0.5, "is_l2": True}
    with pytest.raises(InputError, match=r"^AdamW: its decay is decoupled, use Adam"):
        AdamW(0.1, decoupled=False)


def test_the_module_needs_no_torch() -> None:
    code = "import sys, bagpipe.optim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=250, check=False).returncode == 0


def test_rates_and_epsilons() -> None:
    assert [kind(0.5).rate(3) for kind in RATED] == [0.5] * 5
    assert [kind(lambda step: 1 / (1 + step)).rate(3) for kind in RATED] == [0.25] * 5
    assert [kind(1).epsilon for kind in RATED] == [0.0, 0.0, 1e-10, 1e-8, 1e-8]
    assert [kind(lr=0.0, eps=0.5).epsilon for kind in ADAPTIVE] == [0.5] * 3
    assert (Frozen().rate(3), Frozen().epsilon) == (0.0, 0.0)


@pytest.mark.parametrize("kind", RATED)
@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, "0.1", None, True])
def test_an_invalid_rate_is_refused(kind: Any, lr: Any) -> None:
    with pytest.raises(InputError) as caught:
        kind(lr)
    expected = "a finite number of at least 0, or a function of the step"
    assert str(caught.value) == f"{kind.__name__}: lr must be {expected}, got {lr!r}"
    optimizer = kind(lambda step: lr if step == 2 else 0.1)
    assert optimizer.rate(1) == 0.1
    with pytest.raises(InputError, match=f"^{kind.__name__}: lr must be a finite number of at least 0 at step 2, got"):
        optimizer.rate(2)


@pytest.mark.parametrize("kind", ADAPTIVE)
@pytest.mark.parametrize("eps", [-1e-8, math.nan, math.inf, None, 0, 0.0, 1e-50, 1e-38])
def test_an_invalid_epsilon_is_refused(kind: Any, eps: Any) -> None:
    """One that is 0 in float32, or is not normal there, too."""
    with pytest.raises(InputError) as caught:
        kind(0.1, eps=eps)
    assert str(caught.value) == (
        f"{kind.__name__}: eps must be a finite number of at least 1.18e-38, as a gradient of 0 would give 0 / 0, "
        f"got {eps!r}"
    )


@pytest.mark.parametrize("momentum", [1.0, -0.1, math.nan, None])
def test_an_invalid_momentum_is_refused(momentum: Any) -> None:
    with pytest.raises(InputError) as caught:
        Momentum(0.1, momentum=momentum)
    assert str(caught.value) == f"Momentum: momentum must be a number from 0, below 1, got {momentum!r}"


@pytest.mark.parametrize("lr", [0.0, 1e-50, -0.1, math.nan, True, lambda step: 0.1])
def test_ftrl_has_one_rate(lr: Any) -> None:
    with pytest.raises(
        InputError, match=r"^Ftrl: lr must be a finite number of at least 1.18e-38, which does not change"
    ):
        Ftrl(lr)


@pytest.mark.parametrize("numbers", [{"beta": 0.0}, {"beta": 1e-50}, {"beta": 0.0, "l1": 0.1, "l2": 1e-50}])
def test_ftrl_divides_by_more_than_0(numbers: Any) -> None:
    with pytest.raises(InputError, match=r"^Ftrl: beta or l2 must be a .* at least 1.18e-38, .* by them, got "):
        Ftrl(0.1, **numbers)
    Ftrl(0.1, beta=0.0, l2=1e-6)


@pytest.mark.parametrize("name", ["beta", "l1", "l2"])
def test_an_invalid_number_of_ftrl_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^Ftrl: {name} must be a finite number of at least 0, got -1.0"):
        Ftrl(0.1, **{name: -1.0})


def test_only_the_rate_is_positional() -> None:
    with pytest.raises(TypeError):
        Adagrad(0.1, 1e-8)  # type: ignore[misc]


# ---- by table --------------------------------------------------------------------------------------------------------

NAMES = ("user", "item", "shop")


def test_one_optimizer_is_that_of_all_tables() -> None:
    assert optimizers_of(SGD(0.1), NAMES) == (SGD(0.1),) * 3


@given(named=st.sets(st.sampled_from(NAMES)), has_default=st.booleans())
def test_every_table_has_its_own_or_the_default(named: set[str], has_default: bool) -> None:
    rows: dict[str, RowOptimizer] = {name: Adagrad(float(NAMES.index(name))) for name in named}
    if has_default:
        rows["*"] = Frozen()
    if has_default or len(named) == 3:
        expected = [Adagrad(float(number)) if name in named else Frozen() for number, name in enumerate(NAMES)]
        assert optimizers_of(rows, NAMES) == tuple(expected)
    else:
        without = [name for name in NAMES if name not in named]
        with pytest.raises(InputError) as caught:
            optimizers_of(rows, NAMES)
        assert str(caught.value).endswith(f"got {list(rows)}: unknown [], without an optimizer {without}")


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        optimizers_of({"users": SGD(0.1), "*": Frozen()}, NAMES)
    assert str(caught.value) == (
        "row optimizers: expected one for each of the tables ['user', 'item', 'shop'], or \"*\" for those not named; "
        "got ['users', '*']: unknown ['users'], without an optimizer []"
    )


@pytest.mark.parametrize("rows", [0.1, "adagrad", None, {"*": 0.1}, {"*": SGD}, RowOptimizer()])
def test_something_else_than_an_optimizer_is_refused(rows: Any) -> None:
    with pytest.raises(
        InputError, match=r"^row optimizer of table '\*': expected one of bagpipe.optim \(SGD, Momentum"
    ):
        optimizers_of(rows, NAMES)


def test_the_shared_optimizer_is_that_of_most_tables() -> None:
    assert shared_optimizer([SGD(0.1), Adam(0.1), Adam(0.2)]) == "adam"
    assert shared_optimizer([SGD(0.1), Adam(0.1)]) == "sgd"
    assert shared_optimizer([Frozen(), Frozen(), Adam(0.1)]) == "adam"
    assert shared_optimizer([Frozen()]) == "sgd"


def test_settings_are_equal_where_optimizers_are() -> None:
    def rate(step: int) -> float:
        return 0.1

    optimizers = [SGD(0.1), Adagrad(0.1), SGD(0.1), Adagrad(rate), Adagrad(rate), Adagrad(0.1, eps=1e-8), Frozen()]
    assert settings_of(optimizers) == (0, 1, 0, 2, 2, 3, 4)
