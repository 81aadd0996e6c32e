"""A small click log as a parquet file, and schemas that read it in different ways.

Ids are spread over all 64 bits. `user` and `topic` can be missing, lists can be empty, and hot ids are common.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["NUM_EXAMPLES", "SCHEMAS", "write_clicks", "write_schemas"]

#: 26 batches of 12; the last one holds 5.
NUM_EXAMPLES = 305

SCHEMAS = {
    # all tables sum-pooled; two columns share `items`; `topic` has a small vocabulary of its own
    "sum": """
        sparse = ["user", "items", { name = "queried", table = "items" }, "topic"]
        [tables.topic]
        rows = 9
    """,
    "mean": """
        sparse = ["user", "items", { name = "queried", table = "items" }, "topic"]
        [table_defaults]
        pooling = "mean"
    """,
    "mixed": """
        sparse = ["user", "items", { name = "queried", table = "items" }, "topic"]
        [tables.items]
        pooling = "mean"
        [tables.user]
        rows = 13
        hash = true
    """,
    "weighted": """
        sparse = ["user", { name = "items", weight = "item_weights" }, "topic"]
    """,
    # a weighted and an unweighted summed table, and mean-pooled ones before and between them
    "weighted and mean": """
        sparse = ["topic", { name = "items", weight = "item_weights" }, "queried", "user"]
        [tables.topic]
        pooling = "mean"
        [tables.queried]
        pooling = "mean"
    """,
    # tables of different dimensions, supported only by a model without an interaction
    "ragged": """
        sparse = ["user", "items", "topic"]
        [tables.user]
        dim = 3
        [tables.topic]
        dim = 7
        pooling = "mean"
    """,
    # two labels and weights of examples
    "tasks": """
        label = ["label", "buy"]
        example_weight = "weight"
        sparse = ["user", "items", { name = "queried", table = "items" }, "topic"]
    """,
    # for the factory in tests/system/factory.py: all features combined
    "everything": """
        sparse = ["user", { name = "items", weight = "item_weights" }, { name = "queried", table = "items" }, "topic",
                  "history"]
        [tables.topic]
        rows = 9
        pooling = "mean"
        [tables.history]
        pooling = "none"
    """,
}


def write_clicks(path: Path, *, seed: int = 5, num_examples: int = NUM_EXAMPLES) -> Path:
    """Write the log. Equal arguments give equal bytes."""
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**63), 2**63, size=400, dtype=np.int64)

    def ids(count: int, vocabulary: int) -> list[int]:
        hot = np.minimum(rng.geometric(3.0 / vocabulary, size=count) - 1, vocabulary - 1)
        return [int(word) for word in words[hot]]

    def bags(vocabulary: int, longest: int) -> list[list[int]]:
        return [ids(int(length), vocabulary) for length in rng.integers(0, longest + 1, size=num_examples)]

    items, queried, history = bags(90, 3), bags(90, 2), bags(40, 4)
    dense = rng.standard_normal((3, num_examples)).astype(np.float32)
    label = (dense[0] + np.array([len(bag) for bag in items]) - 1.5 + rng.standard_normal(num_examples)) > 0
    user = [row_id if rng.random() > 0.1 else None for row_id in ids(num_examples, 60)]
    topic = [int(value) if rng.random() > 0.05 else None for value in rng.integers(0, 9, size=num_examples)]
    weights = [rng.standard_normal(len(bag)).astype(np.float32).tolist() for bag in items]
    table = pa.table(
        {
            "label": pa.array(label.astype(np.float32)),
            **{f"d{number}": pa.array(column) for number, column in enumerate(dense)},
            "user": pa.array(user, pa.int64()),
            "items": pa.array(items, pa.list_(pa.int64())),
            "item_weights": pa.array(weights, pa.list_(pa.float32())),
            "queried": pa.array(queried, pa.list_(pa.int64())),
            "topic": pa.array(topic, pa.int64()),
            "history": pa.array(history, pa.list_(pa.int64())),
            # a second label and weights of examples, for "tasks"
            "buy": pa.array((label & (rng.random(num_examples) < 0.4)).astype(np.float32)),
            "weight": pa.array(rng.exponential(size=num_examples).astype(np.float32)),
        }
    )
    pq.write_table(table, path, row_group_size=100)
    return path


def write_schemas(folder: Path) -> dict[str, Path]:
    """Write every schema. Returns their paths by name."""
    paths = {}
    for name, body in SCHEMAS.items():
        paths[name] = folder / f"{name}.toml"
        text = 'dense = ["d0", "d1", "d2"]\n' + textwrap.dedent(body).lstrip()
        paths[name].write_text(text if "label = " in text else 'label = "label"\n' + text)
    return paths
