"""Stand-ins for the modules and parameters of tables whose rows are in a store.

print(model)                          ──described──> a line for each table: rows, dimension, pooling
bags.embedding_bags["user"].weight    ──stored_tables──> refused, in the words of who reads rows
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from bagpipe.errors import InputError

__all__ = ["StoredTable", "StoredTables", "described"]


class StoredTable:
    """Stands for the module of a table.

    Args:
        name: of the table in the model.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def weight(self) -> NoReturn:
        """Refused.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"the weight of table {self._name!r} is no parameter, its rows are in the store: "
            f"pipeline.rows({self._name!r})[ids] reads them, and load_rows gives them before training"
        )

    def __call__(self, *args: object, **more: object) -> NoReturn:
        raise InputError(f"table {self._name!r} is looked up through its collection, not by itself")


class StoredTables(Mapping[str, StoredTable]):
    """Stands for the `nn.ModuleDict` of a collection's tables, by torchrec's names; read-only.

    Args:
        configs: torchrec's.
        table_names: names of the tables in the model.
    """

    def __init__(self, configs: Iterable[Any], table_names: Iterable[str]) -> None:
        self._tables = {config.name: StoredTable(name) for config, name in zip(configs, table_names, strict=True)}

    def __getitem__(self, name: str) -> StoredTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def described(configs: Iterable[Any], table_names: Iterable[str]) -> str:
    """The tables of a collection, a line for each, for `nn.Module.extra_repr`."""
    lines = []
    for config, name in zip(configs, table_names, strict=True):
        pooling = f", {config.pooling.name.lower()}" if hasattr(config, "pooling") else ""
        lines.append(f"({name}): {config.num_embeddings} x {config.embedding_dim}{pooling}, rows in the store")
    return "\n".join(lines)
