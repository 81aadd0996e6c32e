from __future__ import annotations

from bagpipe.embedding.table_optimizers import TableOptimizers
from bagpipe.optim import SGD, Adagrad, Frozen
from bagpipe.types.schema import RowTable

NAMES = ("a", "b", "c")
TABLES = tuple(RowTable(name=name, dim=4) for name in NAMES)


def test_without_optimizers_tables_have_that_of_the_schema() -> None:
    updates = TableOptimizers.of(None, NAMES)
    assert updates.named(TABLES) == TABLES
    assert (updates.shared, updates.ordered(NAMES), updates.settings(NAMES)) == (None, (), None)


def test_one_optimizer_changes_no_table() -> None:
    """So the digest of the row schema is that of a job whose schema names it."""
    updates = TableOptimizers.of({"a": Adagrad(0.1), "*": Adagrad(0.2)}, NAMES)
    assert updates.named(TABLES) == TABLES
    assert updates.shared == "adagrad"
    assert updates.settings(("b", "a", "c")) == (0, 1, 0)


def test_tables_name_another_optimizer_than_the_shared_one() -> None:
    updates = TableOptimizers.of({"a": Frozen(), "*": SGD(0.2)}, NAMES)
    assert [table.optimizer for table in updates.named(TABLES)] == ["frozen", None, None]
    assert updates.shared == "sgd"
    assert updates.ordered(("c", "a")) == (SGD(0.2), Frozen())
