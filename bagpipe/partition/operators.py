"""`OperatorGraph`: a model's operators, edges and costs, the input of the partitioner.

JSON file or measurement ──> OperatorGraph ──> partitioners        sets of operators are bit masks of their numbers
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bagpipe.errors import InputError
from bagpipe.partition.operator import Cost, Linear, Operator
from bagpipe.util.documents import parse_json

__all__ = ["Cost", "Linear", "Operator", "OperatorGraph", "members", "union"]


@dataclass(frozen=True, kw_only=True)
class OperatorGraph:
    """Operators and their edges.

    Attributes:
        operators: in the order of their numbers.
        edges: (producer, consumer) names.

    Raises:
        InputError: no operator, a duplicate name or edge, an edge to an unknown operator, or a cycle.
    """

    operators: tuple[Operator, ...]
    edges: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.operators:
            raise InputError("an operator graph needs at least one operator, got none")
        names: set[str] = set()
        for operator in self.operators:
            if operator.name in names:
                raise InputError(f"operator {operator.name!r} appears twice")
            names.add(operator.name)
        seen: set[tuple[str, str]] = set()
        for edge in self.edges:
            unknown = next((name for name in edge if name not in names), None)
            if unknown is not None:
                known = ", ".join(op.name for op in self.operators[:8])
                raise InputError(f"edge {edge[0]} -> {edge[1]}: unknown operator {unknown!r}; known: {known}, …")
            if edge in seen:
                raise InputError(f"edge {edge[0]} -> {edge[1]} appears twice")
            seen.add(edge)
        self.order  # noqa: B018  (raises for a cycle)

    @property
    def size(self) -> int:
        return len(self.operators)

    @property
    def everything(self) -> int:
        """The mask of all operators."""
        return (1 << self.size) - 1

    @cached_property
    def consumers(self) -> tuple[int, ...]:
        """Per operator, the mask of its consumers."""
        return self._neighbours(0)

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """Per operator, the mask of its producers."""
        return self._neighbours(1)

    def _neighbours(self, near: int) -> tuple[int, ...]:
        number = {operator.name: n for n, operator in enumerate(self.operators)}
        masks = [0] * self.size
        for edge in self.edges:
            masks[number[edge[near]]] |= 1 << number[edge[1 - near]]
        return tuple(masks)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order that finishes a branch before it starts the next (depth first).

        Raises:
            InputError: there is none; the message names the cycle.
        """
        missing = [mask.bit_count() for mask in self.producers]
        ready = [n for n in reversed(range(self.size)) if not missing[n]]
        order: list[int] = []
        while ready:
            operator = ready.pop()
            order.append(operator)
            for consumer in reversed(members(self.consumers[operator])):
                missing[consumer] -= 1
                if not missing[consumer]:
                    ready.append(consumer)
        if len(order) < self.size:
            raise InputError(f"the operator graph has a cycle: {self._spell_cycle(order)}")
        return tuple(order)

    def _spell_cycle(self, done: list[int]) -> str:
        left = self.everything & ~union(1 << n for n in done)
        path = [members(left)[0]]
        while path[-1] not in path[:-1]:
            path.append(members(self.producers[path[-1]] & left)[0])
        cycle = path[path.index(path[-1]) :][::-1]
        return " -> ".join(self.operators[n].name for n in cycle)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Per operator, the mask of all operators that depend on it."""
        reached = [0] * self.size
        for operator in reversed(self.order):
            for consumer in members(self.consumers[operator]):
                reached[operator] |= 1 << consumer | reached[consumer]
        return tuple(reached)

    @property
    def is_chain(self) -> bool:
        """Whether every operator depends on all operators before it."""
        return all(
            self.descendants[operator].bit_count() == self.size - 1 - position
            for position, operator in enumerate(self.order)
        )

    def names(self, mask: int) -> tuple[str, ...]:
        """Names of a set of operators, in topological order."""
        return tuple(self.operators[n].name for n in self.order if mask >> n & 1)

    @classmethod
    def from_json(cls, text: str, source: str = "operator graph") -> OperatorGraph:
        """The graph of a JSON text; docs/partition.md describes the format.

        Raises:
            InputError: not JSON, an unknown or missing key, a cost that is not a number of at least 0, or a bad graph.
        """
        try:
            data = parse_json(text)
        except ValueError as error:  # also for numbers and nestings that are too long
            raise InputError(f"{source}: not JSON: {error}") from None
        if not isinstance(data, dict) or set(data) - {"operators", "edges"} or "operators" not in data:
            raise InputError(f"{source}: expected an object with 'operators' and 'edges'")
        rows, edges = data["operators"], data.get("edges", [])
        if not isinstance(rows, list) or not isinstance(edges, list):
            raise InputError(f"{source}: 'operators' and 'edges' must be lists")
        try:
            operators = tuple(Operator.from_row(row, number) for number, row in enumerate(rows))
            return cls(operators=operators, edges=tuple(_edge(edge) for edge in edges))
        except InputError as error:
            raise InputError(f"{source}: {error}") from None

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        rows = [operator.to_row() for operator in self.operators]
        return json.dumps({"operators": rows, "edges": self.edges}, indent=1) + "\n"


def _edge(edge: Any) -> tuple[str, str]:
    if not isinstance(edge, list) or len(edge) != 2 or not all(isinstance(name, str) for name in edge):
        raise InputError(f"expected an edge as [producer, consumer], got {edge!r}")
    return edge[0], edge[1]


def members(mask: int) -> list[int]:
    """Numbers of the operators in a mask, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def union(masks: Iterable[int]) -> int:
    """All operators of several masks."""
    result = 0
    for mask in masks:
        result |= mask
    return result
