from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data import arrow_files
from data.cli import main
from data.formats import open_source
from data.huggingface import open_dataset
from data.loader import LookaheadLoader
from data.testing import assert_same_batches, check_source, read_all
from tests.data.documented import documented
from tests.data.files import save_to_disk


def table(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "click": pa.array(rng.integers(0, 2, rows)),
        "price": pa.array(rng.random(rows), mask=rng.random(rows) < 0.2),
        "user": pa.array([f"u{number % 7}" for number in range(rows)]),
        "tags": pa.array([list(range(number % 4)) for number in range(rows)]),
        "text": pa.array(["not read"] * rows),
    }
    return pa.table(columns)


def write(folder: Path, rows: int = 50, **options: int) -> dict[str, str]:
    save_to_disk(table(rows), folder / "clicks", **options)
    (folder / "clicks.toml").write_text(documented("Hugging Face's datasets", "toml")[0])
    return {"path": str(folder / "clicks"), "schema": str(folder / "clicks.toml")}


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, num_shards=3)
    monkeypatch.chdir(tmp_path)
    (command,) = documented("Hugging Face's datasets", "sh")
    assert main(command.splitlines()[0].split()[3:]) == 0
    found = read_all(LookaheadLoader(open_source(DataConfig(path="clicks", schema="clicks.toml")), batch_size=20))
    assert [batch.num_examples for batch in found] == [20, 20, 10]
    assert found[0].lengths[1, :5].tolist() == [0, 1, 2, 3, 0]
    converted = open_source(DataConfig(path="clicks.parquet"))
    assert_same_batches(read_all(LookaheadLoader(converted, batch_size=20)), found)


@pytest.mark.parametrize("group_rows", [1, 8, 1000])
def test_keeps_a_readers_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int) -> None:
    """However the record batches of a stream are put together."""
    monkeypatch.setattr(arrow_files, "GROUP_ROWS", group_rows)
    data = write(tmp_path, num_shards=2, batch_rows=5)
    source = open_dataset(data["path"], schema_path=data["schema"], block_rows=10)
    check_source(source)
    assert source.layout == "huggingface/10"
    assert [Path(path).name for path in source.files] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]


def test_files_are_read_in_the_order_of_the_state(tmp_path: Path) -> None:
    data = write(tmp_path, num_shards=2)
    state = json.loads((tmp_path / "clicks/state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "clicks/state.json").write_text(json.dumps(state))
    source = open_dataset(data["path"], schema_path=data["schema"])
    assert [Path(path).name[5:10] for path in source.paths] == ["00001", "00000"]


BAD_STATES = [
    ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "the rows are in an order of their own"),
    ({"_data_files": [{}]}, "state.json: expected _data_files, a list of objects with filename"),
    ({"_data_files": []}, "state.json: the dataset has no data files"),
    ({"_data_files": [{"filename": "no.arrow"}]}, "clicks/no.arrow: No such file or directory"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_STATES)
def test_other_states_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = write(tmp_path)
    path = tmp_path / "clicks/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InputError, match=re.escape(message)):
        open_source(DataConfig(format="huggingface", **data))  # type: ignore[arg-type]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder with state\.json, as Dataset\.save_to_disk writes it"):
        open_dataset(str(tmp_path))
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(InputError, match=r"state\.json: expected a JSON object, got list"):
        open_dataset(str(tmp_path))
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(InputError, match=r"state\.json: not a JSON file"):
        open_dataset(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"got a folder of splits: name one of .*/train, .*/test$"):
        open_dataset(str(tmp_path))


def test_a_stream_that_was_cut_is_refused(tmp_path: Path) -> None:
    """Also between two record batches, where the rest looks like a whole stream."""
    data = write(tmp_path, batch_rows=10)
    path = tmp_path / "clicks/data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"\.arrow: damaged or cut short: the stream has no end"):
        open_dataset(data["path"], schema_path=data["schema"])


def test_columns_of_other_kinds_are_refused(tmp_path: Path) -> None:
    save_to_disk(pa.table({"click": [1], "price": [1.0], "user": ["u"], "tags": [{"bytes": b""}]}), tmp_path / "d")
    (tmp_path / "s.toml").write_text(documented("Hugging Face's datasets", "toml")[0])
    with pytest.raises(InputError, match=r"column 'tags': expected integer ids \(or lists of them\), got struct"):
        open_dataset(str(tmp_path / "d"), schema_path=str(tmp_path / "s.toml"))
