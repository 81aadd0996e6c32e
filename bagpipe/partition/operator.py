"""`Operator`: the unit of placement with its costs, as a record and as a row of a JSON file.

    {"name": …, "forward_per_example_s": …} ──from_row──> Operator ──to_row──> the same row        docs/partition.md

Costs are linear in the number of examples: a fixed cost per call (kernel launches) plus a cost per example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from bagpipe.errors import InputError

__all__ = ["Cost", "Linear", "Operator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one call with n examples: ``fixed_s + n * per_example_s``."""

    fixed_s: float = 0.0
    per_example_s: float = 0.0

    def at(self, examples: float) -> float:
        """Seconds of a call with `examples` examples."""
        return self.fixed_s + examples * self.per_example_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The linear layer of an operator, whose weights can be divided over devices.

    Attributes:
        weight_bytes: of its matrix, a part of the operator's parameters.
        input_bytes: per example of what it multiplies.
        output_bytes: per example of the product.
        columns: each device can compute some features of the operator's output: what follows the product is
            elementwise.
        rows: each device can take some features of the operator's input: nothing comes before the product.
    """

    weight_bytes: float
    input_bytes: float
    output_bytes: float
    columns: bool = True
    rows: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, the unit of placement.

    Attributes:
        name: unique in its graph.
        forward, backward: cost of one micro-batch; a full backward, of inputs and weights.
        param_bytes: bytes of its parameters.
        activation_bytes: bytes per example kept from forward to backward.
        output_bytes: bytes per example that its consumers take.
        entering_bytes: bytes per example of its inputs that no operator makes: dense inputs, embedding vectors.
        linear: None: its weights cannot be divided.
    """

    name: str
    forward: Cost
    backward: Cost
    param_bytes: float = 0
    activation_bytes: float = 0
    output_bytes: float = 0
    entering_bytes: float = 0
    linear: Linear | None = None

    def to_row(self) -> dict[str, Any]:
        """The row that `from_row` reads, without `linear` if there is none."""
        row = {
            "name": self.name,
            "forward_fixed_s": self.forward.fixed_s,
            "forward_per_example_s": self.forward.per_example_s,
            "backward_fixed_s": self.backward.fixed_s,
            "backward_per_example_s": self.backward.per_example_s,
            "param_bytes": self.param_bytes,
            "activation_bytes": self.activation_bytes,
            "output_bytes": self.output_bytes,
            "entering_bytes": self.entering_bytes,
        }
        if self.linear is not None:
            row["linear"] = {each.name: getattr(self.linear, each.name) for each in fields(Linear)}
        return row

    @classmethod
    def from_row(cls, row: Any, number: int) -> Self:
        """The operator of a row of JSON.

        Args:
            row: a parsed value.
            number: of the operator, for messages.

        Raises:
            InputError: an unknown or missing key, or a value out of range; one line.
        """
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise InputError(f"operator {number}: expected an object with a 'name'")
        name = row["name"]
        if not name.isprintable():
            raise InputError(f"operator {number}: expected a name of printable characters, got {name!r}")
        where = f"operator {name!r}"
        linear = row.get("linear")
        values = _numbers({key: row[key] for key in row if key not in ("name", "linear")}, where, _NUMBERS, "name, ")
        return cls(
            name=name,
            forward=Cost(fixed_s=values["forward_fixed_s"], per_example_s=values["forward_per_example_s"]),
            backward=Cost(fixed_s=values["backward_fixed_s"], per_example_s=values["backward_per_example_s"]),
            param_bytes=values["param_bytes"],
            activation_bytes=values["activation_bytes"],
            output_bytes=values["output_bytes"],
            entering_bytes=values["entering_bytes"],
            linear=None if linear is None else _linear(linear, f"{where}: linear", values["param_bytes"]),
        )


#: Limit of seconds and bytes, small enough that sums stay finite.
_LARGEST = 1e30

#: JSON key -> whether it is required.
_NUMBERS: Mapping[str, bool] = {
    "forward_fixed_s": False,
    "forward_per_example_s": True,
    "backward_fixed_s": False,
    "backward_per_example_s": True,
    "param_bytes": False,
    "activation_bytes": False,
    "output_bytes": False,
    "entering_bytes": False,
}
_LINEAR_NUMBERS: Mapping[str, bool] = {"weight_bytes": True, "input_bytes": True, "output_bytes": True}


def _linear(row: Any, where: str, param_bytes: float) -> Linear:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, got {row!r}")
    divisions = {key: row.get(key, True) for key in ("columns", "rows")}
    for key, value in divisions.items():
        if not isinstance(value, bool):
            raise InputError(f"{where}: {key} must be true or false, got {value!r}")
    values = _numbers({key: row[key] for key in row if key not in divisions}, where, _LINEAR_NUMBERS, "columns, rows, ")
    if values["weight_bytes"] > param_bytes:
        raise InputError(
            f"{where}: weight_bytes must be at most param_bytes, {param_bytes!r}, got {row['weight_bytes']!r}"
        )
    return Linear(
        weight_bytes=values["weight_bytes"],
        input_bytes=values["input_bytes"],
        output_bytes=values["output_bytes"],
        columns=divisions["columns"],
        rows=divisions["rows"],
    )


def _numbers(row: Mapping[str, Any], where: str, known: Mapping[str, bool], others: str) -> dict[str, float]:
    """The values of the known keys of a row; those that are not required are 0 by default."""
    unknown = next((key for key in row if key not in known), None)
    if unknown is not None:
        raise InputError(f"{where}: unknown key {unknown!r}; known: {others}{', '.join(known)}")
    values: dict[str, float] = {}
    for key, required in known.items():
        if required and key not in row:
            raise InputError(f"{where}: {key} is missing")
        value = row.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InputError(f"{where}: {key} must be a number of at least 0, got {value!r}")
        if value > _LARGEST:
            raise InputError(f"{where}: {key} must be at most {_LARGEST:g}, got a larger number")
        values[key] = value
    return values
