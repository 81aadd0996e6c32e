"""A small log in the columnar form, with missing values, several tables and ids over all 64 bits."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq

from data.cli import main
from data.columnar_writer import write_columnar
from data.synthetic import SyntheticSource
from data.synthetic_options import options_at

__all__ = ["run_replay", "write_log"]

SCHEMA = """
label = "label"
dense = ["I1"]
sparse = ["user", "item", { name = "seen", table = "item" }]

[tables.user]
rows = 300

[synthetic]
rows = {rows}

[synthetic.features.user]
vocabulary = 300
missing = 0.2

[synthetic.features.item]
vocabulary = 900

[synthetic.features.seen]
vocabulary = 900
bag = 2
"""


def write_log(folder: Path, rows: int = 600) -> Path:
    """`rows` examples of three features over a bounded and an unbounded table."""
    schema, path = folder / "schema.toml", folder / "log.parquet"
    schema.write_text(SCHEMA.replace("{rows}", str(rows)))
    options = options_at(str(schema))
    source = SyntheticSource(
        schema=options.schema,
        features=options.features,
        rows=options.rows,
        seed=3,
        label_rate=options.label_rate,
    )
    write_columnar(source, str(path))
    assert pq.read_metadata(path).num_rows == rows
    return path


def run_replay(*flags: object) -> tuple[int, str]:
    """The command's exit code and its output."""
    out = io.StringIO()
    return main(["replay", *map(str, flags)], out), out.getvalue()
