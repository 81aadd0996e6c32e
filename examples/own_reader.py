"""A reader of your own: JSON lines such as {"clicked": 1, "price": 3.5, "user": "u17", "tags": ["new", "red"]}.

python -m examples.own_reader clicks.jsonl clicks.arrow
python -m trainer --data.path clicks.arrow --data.format parquet
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature, Table
from bagpipe.util.program import run_program
from data.columnar_writer import write_columnar
from data.columns import Columns
from data.source import Block, Segment
from data.text_files import BLOCK_BYTES, count_segment, list_files, locate_line, read_text, text_blocks, text_segments

USER, TAGS = Feature(name="user", table="user"), Feature(name="tags", table="tags")
TABLES = (Table(name="user"), Table(name="tags", pooling="mean"))
SCHEMA = DataSchema(label="clicked", dense=("price",), features=(USER, TAGS), tables=TABLES)


def id_of(text: str) -> int:
    """Hash a string to an id of 63 bits, the same in every run."""
    return xxhash.xxh64_intdigest(text.encode()) >> 1


@dataclass(frozen=True, kw_only=True)
class JsonLinesSource:
    files: tuple[str, ...]
    schema: DataSchema = SCHEMA
    in_processes: bool = True  # Python code: needs worker processes
    multi_hot: frozenset[str] = frozenset({"tags"})
    bad_rows: str = "stop"
    layout: str = f"json-lines/{BLOCK_BYTES}"

    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for file in self.files for segment in text_segments(file, BLOCK_BYTES))

    def blocks(self, segment: Segment) -> Iterator[Block]:
        return text_blocks(segment, BLOCK_BYTES)

    def locate(self, block: Block, row: int) -> str:
        return locate_line(block, row)

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return count_segment(segment, at_most)

    def read(self, block: Block) -> Columns:
        labels, prices, users, tags = [], [], [], []
        for number, line in enumerate(read_text(block).splitlines()):
            try:
                row = json.loads(line)
                labels.append(float(row["clicked"]))
                prices.append([float(row.get("price") or 0)])  # missing: 0
                users.append([id_of(row["user"])] if row.get("user") else [])  # missing: an empty bag
                tags.append([id_of(tag) for tag in row.get("tags") or []])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                where = self.locate(block, number)
                raise InputError(f"{where}: expected an object with a number 'clicked', got {error!r}") from None
        return Columns(
            labels=np.array(labels, np.float32),
            dense=np.array(prices, np.float32),
            values=np.array([number for bag in users + tags for number in bag], np.int64),  # feature after feature
            lengths=np.array([[len(bag) for bag in users], [len(bag) for bag in tags]], np.int32),
            weights=None,
            num_raw_rows=len(labels),
            bad_rows=np.zeros(0, np.int64),
        )


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise InputError(f"expected a file to read and an .arrow file to write, got {len(argv)} arguments")
    path, out = argv
    write_columnar(JsonLinesSource(files=list_files(path)), out)


if __name__ == "__main__":
    sys.exit(run_program(main))
