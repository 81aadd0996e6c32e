"""Readers over an object store give the batches of local files, under faults too."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagpipe.config.data_format import with_format
from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.files import remote, remote_file
from bagpipe.types.batch import Batch
from cacher.identity import identity_of
from data.formats import open_source
from data.loader import LookaheadLoader
from data.testing import assert_same_batches, read_all
from tests.data.files import avazu_csv, avazu_rows, criteo_lines, write_examples
from tests.effort import some_of
from tests.files.s3_server import Proxy

SCHEMA = 'label = "y"\ndense = ["x"]\nsparse = ["a"]\n'


def write_data(form: str, folder: Path) -> None:
    """Two files of a format."""
    folder.mkdir()
    rows = [{"y": number % 2, "x": number / 8, "a": number * number} for number in range(3000)]
    for part in range(2):
        some = rows[part::2]
        columns = pa.table({name: [row[name] for row in some] for name in rows[0]})
        if form == "criteo-tsv":
            text = criteo_lines(800, seed=part)
            (folder / f"day_{part}.tsv{'.gz' if part else ''}").write_bytes(gzip.compress(text) if part else text)
        elif form == "avazu-csv":
            (folder / f"{part}.csv").write_bytes(avazu_csv(avazu_rows(100, seed=part)))
        elif form == "csv":
            lines = [f"{row['y']},{row['x']},{row['a']}\n" for row in some]
            (folder / f"{part}.csv").write_text("y,x,a\n" + "".join(lines))
        elif form == "parquet":
            pq.write_table(columns, folder / f"{part}.parquet", row_group_size=400)
        elif form == "arrow":
            with pa.OSFile(str(folder / f"{part}.arrow"), "wb") as sink, pa.ipc.new_file(sink, columns.schema) as out:
                out.write_table(columns, max_chunksize=400)
        elif form == "mlperf-npz":
            ids = np.arange(300 * 26, dtype=np.int32).reshape(300, 26)
            np.save(folder / f"day_{part}_dense.npy", np.ones((300, 13), np.float32))
            np.save(folder / f"day_{part}_labels.npy", np.zeros((300, 1), np.int32))
            if part:
                np.save(folder / f"day_{part}_sparse.npy", ids)
            else:
                np.savez(folder / f"day_{part}_sparse_multi_hot.npz", **{str(n): ids[:, n : n + 1] for n in range(26)})
        elif form == "tfrecord":
            examples = [{"y": [float(row["y"])], "x": [row["x"]], "a": [row["a"]]} for row in some[:200]]
            write_examples(folder / f"{part}.tfrecord{'.gz' if part else ''}", examples)


def batches(path: str, schema: str, form: str = "", workers: int = 0) -> list[Batch]:
    config = DataConfig(path=path, schema=schema, format=form or "synthetic")  # type: ignore[arg-type]
    with_schema = open_source(with_format(config))
    return list(read_all(LookaheadLoader(with_schema, batch_size=100, workers=workers)))


def upload(folder: Path, url: str) -> None:
    for path in folder.iterdir():
        fsspec.filesystem("s3").pipe_file(f"{url}/{path.name}", path.read_bytes())


@pytest.mark.parametrize(
    "form", some_of(["criteo-tsv", "avazu-csv", "csv", "parquet", "arrow", "tfrecord", "mlperf-npz"], {0, 3, 5, 6})
)
def test_every_reader_gives_the_batches_of_local_files(form: str, tmp_path: Path, bucket: str) -> None:
    write_data(form, tmp_path / "days")
    schema = ""
    if form not in ("criteo-tsv", "avazu-csv", "mlperf-npz"):
        schema = str(tmp_path / "schema.toml")
        Path(schema).write_text(SCHEMA)
    upload(tmp_path / "days", f"{bucket}/days")
    local = batches(str(tmp_path / "days"), schema)
    assert_same_batches(batches(f"{bucket}/days", schema), local)
    first = min(path.name for path in (tmp_path / "days").iterdir())
    assert_same_batches(batches(f"{bucket}/days/{first}", schema), batches(str(tmp_path / "days" / first), schema))


def test_a_file_over_http(tmp_path: Path, bucket: str, proxy: Proxy) -> None:
    write_data("criteo-tsv", tmp_path / "days")
    system = fsspec.filesystem("s3")
    system.pipe_file("bucket/secret.tsv", b"")
    for name in ("day_0.tsv", "day_1.tsv.gz"):
        system.pipe_file(f"bucket/days/{name}", (tmp_path / "days" / name).read_bytes(), ACL="public-read")
        local = batches(str(tmp_path / "days" / name), "")
        assert_same_batches(batches(f"{proxy.address}/bucket/days/{name}", ""), local)
    for name, message in (("secret", "no access: .*; credentials come by"), ("days/none", "no such file or folder")):
        with pytest.raises(InputError, match=rf"http://.*/{name}\.tsv: {message}"):
            open_source(DataConfig(path=f"{proxy.address}/bucket/{name}.tsv", format="criteo-tsv"))


def test_a_row_group_takes_few_requests(tmp_path: Path, bucket: str, proxy: Proxy) -> None:
    write_data("parquet", tmp_path / "days")
    upload(tmp_path / "days", f"{bucket}/days")
    schema = tmp_path / "schema.toml"
    schema.write_text(SCHEMA)
    proxy.requests.clear()
    assert len(batches(f"{bucket}/days", str(schema), "parquet")) == 30
    num_groups = 2 * 4
    assert sum(method == "GET" and "list-type" not in path for method, path in proxy.requests) <= num_groups + 2 * 8


@pytest.mark.multiproc
def test_one_fault_in_a_hundred_requests_changes_nothing(
    tmp_path: Path, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "FIRST_BYTES", 2_000)  # many requests
    write_data("criteo-tsv", tmp_path / "days")
    upload(tmp_path / "days", f"{bucket}/days")
    rng, kinds = random.Random(7), ("500", "cut", "slow")
    fault_of = {number: rng.choice(kinds) for number in range(0, 5000, 100)}
    proxy.requests.clear()
    proxy.faults = lambda number, method, path: fault_of.get(number + 99, "")
    local = batches(str(tmp_path / "days"), "")
    for _ in range(3):
        assert_same_batches(batches(f"{bucket}/days", "", workers=1), local)
    config = DataConfig(path=f"{bucket}/days", format="criteo-tsv")
    while not proxy.injected:
        open_source(config).segments()
        remote.forget(bucket)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, bucket: str) -> None:
    write_data("parquet", tmp_path / "days")
    upload(tmp_path / "days", f"{bucket}/days")
    schema = tmp_path / "schema.toml"
    schema.write_text(SCHEMA)
    source = open_source(DataConfig(path=f"{bucket}/days", schema=str(schema), format="parquet"))
    segments = source.segments()
    fsspec.filesystem("s3").pipe_file("bucket/days/0.parquet", (tmp_path / "days" / "1.parquet").read_bytes())
    block = next(source.blocks(segments[0]))
    with pytest.raises(
        InputError, match=r"s3://bucket/days/0\.parquet changed while it was read: it had \d+ bytes, etag"
    ):
        source.read(block)


def test_the_identity_of_a_remote_file_is_its_etag(tmp_path: Path, bucket: str) -> None:
    url = f"{bucket}/a.tsv"
    found = []
    for content in (b"one", b"one", b"two"):
        fsspec.filesystem("s3").pipe_file("bucket/a.tsv", content)
        remote.forget(url)
        found.append(identity_of((url,), "text"))
    assert found[0].first_change(found[1]) is None
    change = found[0].first_change(found[2])
    assert change is not None
    assert change.startswith(f"{url} has another etag, ")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("huggingface", "datasets of Dataset.save_to_disk are read from local folders: copy the folder"),
        ("criteo-tsv", "no such file or folder"),
    ],
)
def test_what_cannot_be_read_is_refused(form: str, message: str, bucket: str) -> None:
    with pytest.raises(InputError, match=f"^data.path {bucket}/days: {message}$"):
        open_source(DataConfig(path=f"{bucket}/days", format=form))  # type: ignore[arg-type]
