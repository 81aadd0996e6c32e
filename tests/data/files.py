"""Small Criteo and Avazu texts, folders of Hugging Face's layout, and the real sample if it is installed."""

from __future__ import annotations

import gzip
import json
import os
import random
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

__all__ = [
    "AVAZU_NAMES",
    "avazu_csv",
    "avazu_row",
    "avazu_rows",
    "criteo_line",
    "criteo_lines",
    "real_samples",
    "save_to_disk",
    "write_examples",
]


def real_samples() -> list[Path]:
    """The file $BAGPIPE_CRITEO_SAMPLE, or criteo_sample.tsv.gz under $BAGPIPE_DATA, if it exists."""
    named = os.environ.get("BAGPIPE_CRITEO_SAMPLE")
    path = Path(named) if named else Path(os.environ.get("BAGPIPE_DATA", "datasets")) / "criteo_sample.tsv.gz"
    return [path] if path.is_file() else []


def criteo_line(label: str = "0", dense: str = "1", sparse: str = "a") -> bytes:
    """One line, the same value in every column of a kind."""
    return "\t".join([label, *[dense] * 13, *[sparse] * 26]).encode()


def criteo_lines(rows: int, seed: int = 0) -> bytes:
    """Lines with all valid variations: missing values, negative integers, ids of 1 to 16 digits, both cases."""
    rng = random.Random(seed)
    lines = []
    for _ in range(rows):
        dense = [rng.choice(["", "0", "-1", "-22", str(rng.randrange(10**9)), "0007"]) for _ in range(13)]
        ids = []
        for _ in range(26):
            text = f"{rng.getrandbits(64):016x}"[: rng.randint(1, 16)]
            ids.append(rng.choice(["", text, text.upper(), text]))
        lines.append("\t".join([rng.choice("01"), *dense, *ids]))
    return "".join(line + "\n" for line in lines).encode()


AVAZU_NAMES = [
    "id",
    "click",
    "hour",
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    "C14",
    "C15",
    "C16",
    "C17",
    "C18",
    "C19",
    "C20",
    "C21",
]


def avazu_row(**values: str) -> dict[str, str]:
    """Fields of one line by name, with overrides."""
    hexadecimal = ("site_", "app_", "device_i", "device_m")
    row = {name: "1fbe01fe" if name.startswith(hexadecimal) else "320" for name in AVAZU_NAMES}
    return {**row, "id": "1000009418151094273", "click": "0", "hour": "14102123", "C20": "-1", **values}


def avazu_rows(rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Lines with all valid variations: missing values, negative integers, ids of 1 to 16 digits, both cases."""
    rng = random.Random(seed)
    found = []
    for _ in range(rows):
        row = avazu_row()
        for name in AVAZU_NAMES[3:]:
            text = f"{rng.getrandbits(64):016x}"[: rng.randint(1, 16)]
            number = str(rng.randrange(-1, 10 ** rng.randint(1, 16)))
            row[name] = rng.choice(["", *([text, text.upper()] if row[name] == "1fbe01fe" else [number, number])])
        row["hour"] = f"{rng.randrange(10, 30)}{rng.randrange(1, 13):02}{rng.randrange(1, 29):02}{rng.randrange(24):02}"
        row["click"] = rng.choice("01")
        found.append(row)
    return found


def avazu_csv(rows: list[dict[str, str]], names: list[str] = AVAZU_NAMES, end: str = "\n") -> bytes:
    """A header and the text of lines."""
    return "".join(",".join(line) + end for line in [names, *([row[name] for name in names] for row in rows)]).encode()


def save_to_disk(table: pa.Table, folder: Path, num_shards: int = 1, batch_rows: int = 1000) -> None:
    """What `datasets.Dataset.save_to_disk` of version 5.2 writes."""
    folder.mkdir()
    names = [f"data-{shard:05}-of-{num_shards:05}.arrow" for shard in range(num_shards)]
    cuts = [table.num_rows * shard // num_shards for shard in range(num_shards + 1)]
    for name, low, high in zip(names, cuts, cuts[1:], strict=False):
        with (folder / name).open("wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(low, high - low), max_chunksize=batch_rows)
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "ef46db3751d8e999",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def write_examples(path: Path, rows: Iterable[Mapping[str, object] | None]) -> None:
    """A TFRecord file of examples: lists of int, float, str or bytes by feature; None: a record that is no example."""
    from data.tf_example import example_class
    from data.tfrecord import masked_crc

    records = []
    for row in rows:
        example = example_class()()
        for name, values in (row or {}).items():
            items = [item.encode() if isinstance(item, str) else item for item in _as_list(values)]
            kind = {int: "int64_list", float: "float_list", bytes: "bytes_list"}[type(items[0])] if items else ""
            if kind:
                getattr(example.features.feature[name], kind).value.extend(items)
        record = b"no example" if row is None else example.SerializeToString()
        length = struct.pack("<Q", len(record))
        records += [length, struct.pack("<I", masked_crc(length)), record, struct.pack("<I", masked_crc(record))]
    content = b"".join(records)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def _as_list(values: object) -> list[object]:
    return [] if values is None else values if isinstance(values, list) else [values]
