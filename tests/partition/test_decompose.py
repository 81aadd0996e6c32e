from __future__ import annotations

import pytest
from hypothesis import given

from bagpipe.partition.decompose import SPTree, decompose, parallel, series
from bagpipe.partition.operators import OperatorGraph, members
from tests.partition.graphs import graph, operator_graphs, towers


def spelt(operators: OperatorGraph, tree: SPTree) -> str:
    """Text ``(a b|c)`` of a tree: series by blanks, parallel by bars."""
    if tree.kind == "leaf":
        return operators.names(tree.mask)[0]
    joined = (" " if tree.kind == "series" else "|").join(spelt(operators, part) for part in tree.parts)
    return f"({joined})"


@pytest.mark.parametrize(
    ("edges", "alone", "tree"),
    [
        ([], "a", "a"),
        (["ab", "bc"], "", "(a b c)"),
        (["ab", "bc", "ac"], "", "(a b c)"),
        (["ac", "bc"], "", "((a|b) c)"),
        (["ab", "ac", "bd", "cd"], "", "(a (b|c) d)"),
        (["ab", "bd", "cd", "de", "df", "fg", "eh", "gh"], "", "(((a b)|c) d (e|(f g)) h)"),
        (["ac", "ad", "bc", "bd"], "", "((a|b) (c|d))"),
        (["ab"], "c", "((a b)|c)"),
    ],
)
def test_series_parallel_graphs(edges: list[str], alone: str, tree: str):
    operators = graph(edges, alone=alone)
    found = decompose(operators)
    assert spelt(operators, found) == tree
    assert found.barriers == 0


def test_the_smallest_graph_that_is_none_gets_a_barrier():
    operators = graph(["ac", "ad", "bd"])
    found = decompose(operators)
    assert spelt(operators, found) == "((a|b) (c|d))"
    assert found.barriers == 1


def test_the_barrier_adds_as_little_order_as_it_can():
    """A barrier after a, b adds b -> c; a barrier before e, f adds five pairs."""
    operators = graph(["ac", "ad", "bd", "ce", "df"])
    assert spelt(operators, decompose(operators)) == "((a|b) ((c e)|(d f)))"


def test_towers():
    found = decompose(towers(3, 2))
    assert found.barriers == 0
    assert [part.kind for part in found.parts] == ["parallel", "leaf", "leaf"]
    assert len(found.parts[0].parts) == 3


@given(operator_graphs(8))
def test_the_tree_keeps_every_dependency(operators: OperatorGraph):
    """Every operator is in one leaf. The tree keeps the order, and adds nothing to it without barriers."""
    before = [0] * operators.size

    def walk(tree: SPTree) -> None:
        if tree.kind == "leaf":
            assert tree.mask.bit_count() == 1
        union = 0
        for part in tree.parts:
            assert not union & part.mask
            assert part.kind != tree.kind
            if tree.kind == "series":
                for number in members(union):
                    before[number] |= part.mask
            union |= part.mask
            walk(part)
        assert not tree.parts or union == tree.mask

    tree = decompose(operators)
    walk(tree)
    assert tree.mask == operators.everything
    for more, needed in zip(before, operators.descendants, strict=True):
        assert needed & ~more == 0
        if not tree.barriers:
            assert more == needed


def test_joining_flattens():
    one, two, three = (SPTree("leaf", 1 << n) for n in range(3))
    assert series(one) is one
    assert series(series(one, two), three) == series(one, two, three)
    assert parallel(one, parallel(two, three)).parts == (one, two, three)
    assert parallel(series(one, two), three).mask == 0b111
