from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.criteo import CriteoSource
from data.loader import LookaheadLoader, open_loader
from data.testing import assert_same_batches, check_resume, read_all
from tests.data.files import criteo_line, criteo_lines, real_samples


@pytest.fixture
def source(tmp_path: Path) -> CriteoSource:
    """100 lines in about 15 blocks; the first dense column numbers them."""
    return numbered_source(tmp_path / "numbered.tsv", 100)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No test leaks threads or child processes."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("bagpipe-loader")] == []
    assert multiprocessing.active_children() == []


def numbered_source(path: Path, rows: int, bad: tuple[int, ...] = (), **options: Any) -> CriteoSource:
    lines = [criteo_line(dense=str(row), sparse=f"{row:x}") for row in range(rows)]
    for row in bad:
        lines[row] = b"bad"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return CriteoSource(files=(str(path),), block_bytes=700, **options)


def rows_of(batches: list[Batch]) -> list[int]:
    return [round(float(value)) for batch in batches for value in np.expm1(batch.dense[:, 0].astype(np.float64))]


def test_batches_in_file_order(source: CriteoSource) -> None:
    batches = read_all(LookaheadLoader(source, batch_size=32))
    assert [batch.index for batch in batches] == [0, 1, 2, 3]
    assert [batch.num_examples for batch in batches] == [32, 32, 32, 4]
    assert rows_of(batches) == list(range(100))
    assert batches[1].values.reshape(26, 32).tolist() == [list(range(32, 64))] * 26


def test_epochs_do_not_share_batches(source: CriteoSource) -> None:
    batches = read_all(LookaheadLoader(source, batch_size=60, epochs=3))
    assert [batch.num_examples for batch in batches] == [60, 40] * 3
    assert [batch.index for batch in batches] == list(range(6))


def test_the_share_that_is_served(tmp_path: Path) -> None:
    """Exact where rows are counted; by segments otherwise; none of few segments."""

    def shares(source: CriteoSource, **options: Any) -> list[float | None]:
        batches = read_all(LookaheadLoader(source, batch_size=30, epochs=2, **options))
        return [(batch.reader_state or {})["share"] for batch in batches]

    source = numbered_source(tmp_path / "long.tsv", 200)
    assert shares(source, eval_fraction=0.1) == [number / 12 for number in range(1, 13)]
    for shuffle in (False, True):
        estimated = np.array(shares(source, shuffle=shuffle))
        np.testing.assert_allclose(estimated, np.arange(1, 15) / 14, atol=0.08)
        assert (np.diff(estimated) > 0).all()
    assert set(shares(numbered_source(tmp_path / "short.tsv", 60))) == {None}
    assert set(shares(source, limit=100)) == {None}


@pytest.mark.parametrize(
    ("eval_fraction", "rows", "message"),
    [(0.2, 80, r"day\.gz: expected 50 more rows, as first counted"),
     (0.0, 100, r"day\.gz or a file before it: expected 50 more rows, as in the previous epoch")],
)  # fmt: skip
def test_a_gz_that_got_shorter_since_its_rows_were_counted_is_refused(
    tmp_path: Path, eval_fraction: float, rows: int, message: str
) -> None:
    """For example between two epochs, replaced by another valid file."""
    lines = [criteo_line(dense=str(row)) + b"\n" for row in range(100)]
    path = tmp_path / "day.gz"
    path.write_bytes(gzip.compress(b"".join(lines)))
    source = CriteoSource(files=(str(path),), block_bytes=700)
    with LookaheadLoader(source, batch_size=10, epochs=2, eval_fraction=eval_fraction, batches_ahead=1) as loader:
        served = [next(loader)]
        (tmp_path / "new").write_bytes(gzip.compress(b"".join(lines[:50])))
        (tmp_path / "new").rename(path)
        with pytest.raises(InputError, match=message):
            served += loader
    assert rows_of(served) == [*range(rows), *range(50)]


@pytest.mark.parametrize("limit", [0, 1, 37, 100, 1000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_limit_comes_before_the_split(source: CriteoSource, limit: int, shuffle: bool) -> None:
    used = min(limit or 100, 100)
    held_out = used // 4
    options: dict[str, Any] = {"batch_size": 10, "limit": limit, "eval_fraction": 0.25, "shuffle": shuffle}
    train = rows_of(read_all(LookaheadLoader(source, **options)))
    held = rows_of(read_all(LookaheadLoader(source, phase="eval", epochs=5, **options)))
    assert sorted(train) == list(range(used - held_out))
    assert held == list(range(used - held_out, used))
    assert (train == sorted(train)) == (not shuffle or used - held_out < 2)
    without_split = rows_of(read_all(LookaheadLoader(source, batch_size=10, limit=limit, shuffle=shuffle)))
    assert sorted(without_split) == list(range(used))
    assert read_all(LookaheadLoader(source, batch_size=10, phase="eval")) == []


def test_shuffled_orders_differ_by_epoch_and_seed(source: CriteoSource) -> None:
    orders = [
        rows_of(read_all(LookaheadLoader(source, batch_size=100, shuffle=True, seed=seed, epochs=2))) for seed in (0, 1)
    ]
    epochs = [tuple(order[start : start + 100]) for order in orders for start in (0, 100)]
    assert len(set(epochs)) == 4
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    again = rows_of(read_all(LookaheadLoader(source, batch_size=7, shuffle=True, seed=0, epochs=2)))
    assert again == orders[0], "the order depends on the batch size"


def test_a_gz_shuffles_its_files_and_rows(tmp_path: Path) -> None:
    numbered_source(tmp_path / "plain.tsv", 90)
    lines = (tmp_path / "plain.tsv").read_bytes().splitlines(keepends=True)
    for day in range(3):
        (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(b"".join(lines[30 * day : 30 * day + 30])))
    source = CriteoSource(files=tuple(str(tmp_path / f"day_{day}.gz") for day in range(3)), block_bytes=700)
    rows = rows_of(read_all(LookaheadLoader(source, batch_size=10, shuffle=True, seed=5)))
    assert sorted(rows) == list(range(90))
    assert rows != list(range(90))


def test_workers_give_the_same_batches(source: CriteoSource) -> None:
    for options in ({}, {"shuffle": True, "eval_fraction": 0.1, "epochs": 2}):
        settings: dict[str, Any] = {"batch_size": 9, **options}
        expected = read_all(LookaheadLoader(source, **settings))
        with LookaheadLoader(source, workers=2, **settings) as loader:
            assert_same_batches(loader, expected)
            statistics = loader.statistics()
        assert 1 <= statistics.blocks_peak <= statistics.blocks_max == 5
        assert statistics.batches_peak <= statistics.batches_max
        assert statistics.rows_read >= 90


def test_queues_are_bounded(source: CriteoSource) -> None:
    with LookaheadLoader(source, batch_size=1, batches_ahead=3) as loader:
        for _ in loader:
            assert loader.statistics().batches_ready <= 3
        statistics = loader.statistics()
    assert statistics.batches_peak <= 3
    assert statistics.rows_read == 100
    assert statistics.blocks_in_flight == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_block_raises_after_the_batches_before_it(tmp_path: Path, workers: int) -> None:
    source = numbered_source(tmp_path / "bad.tsv", 100, bad=(50, 80))
    message = f"{tmp_path / 'bad.tsv'}:51: expected 40 tab-separated columns, got 1"
    with LookaheadLoader(source, batch_size=4, workers=workers) as loader:
        batches: list[Batch] = []
        with pytest.raises(InputError, match=f"^{re.escape(message)}$") as raised:
            batches.extend(loader)
        assert raised.value.__cause__ is None
        with pytest.raises(InputError, match=re.escape(message)):
            next(loader)
    rows = rows_of(batches)
    assert rows == list(range(len(rows)))
    assert 36 < len(rows) <= 50
    assert len(rows) % 4 == 0, "a partial batch was served before the error"
    # Rows after the limit are not parsed, unless they share a block with rows before it.
    assert rows_of(read_all(LookaheadLoader(source, batch_size=4, workers=workers, limit=36))) == list(range(36))


def test_a_cut_gzip_raises_after_the_batches_before_it(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(criteo_lines(3000))[:-100_000])
    for workers in (0, 1):
        with LookaheadLoader(
            CriteoSource(files=(str(path),), block_bytes=50_000), batch_size=16, workers=workers
        ) as loader:
            batches: list[Batch] = []
            with pytest.raises(InputError, match="got a file cut short"):
                batches.extend(loader)
        assert len(batches) > 10


def test_skipped_rows_are_counted_and_resumed(tmp_path: Path) -> None:
    source = numbered_source(tmp_path / "bad.tsv", 100, bad=(0, 30, 31, 32, 33, 34, 35, 36, 37, 99), bad_rows="skip")
    for shuffle in (False, True):
        settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": shuffle}
        batches = check_resume(lambda state, settings=settings: LookaheadLoader(source, state=state, **settings))
        assert sum(batch.num_examples for batch in batches) == 180
        with LookaheadLoader(source, **settings) as loader:
            assert sum(batch.num_examples for batch in loader) == 180
            assert loader.skipped_rows() == 20
    with LookaheadLoader(source, batch_size=8, eval_fraction=0.1, phase="eval") as loader:
        assert rows_of(list(loader)) == list(range(90, 99))
        assert loader.skipped_rows() == 1


def test_nothing_but_bad_rows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "crlf.tsv"
    path.write_bytes(criteo_lines(20).replace(b"\n", b"\r\n"))
    source = CriteoSource(files=(str(path),), bad_rows="skip")
    with pytest.raises(InputError, match="expected at least one good row, got 20 malformed rows"):
        read_all(LookaheadLoader(source, batch_size=8))


def test_state_is_small_and_plain(source: CriteoSource) -> None:
    with LookaheadLoader(source, batch_size=8, workers=0) as loader:
        next(loader)
        state = loader.state()
    assert len(json.dumps(state)) < 500
    for change in ({"batch_size": 9}, {"limit": 50}, {"eval_fraction": 0.5}, {"shuffle": True}):
        settings: dict[str, Any] = {"batch_size": 8, **change}
        with pytest.raises(
            InputError, match=rf"loader state: .*{next(iter(change))} was .* when saved, is .* now|seed"
        ):
            LookaheadLoader(source, state=state, **settings)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("served", [0, 1])
def test_closing_early_leaves_nothing_behind(source: CriteoSource, workers: int, served: int) -> None:
    with LookaheadLoader(source, batch_size=2, epochs=1000, workers=workers) as loader:
        for _ in range(served):
            next(loader)
    loader.close()
    with pytest.raises(RuntimeError, match="inside its `with` block"):  # not StopIteration
        next(loader)


def test_an_error_in_the_body_leaves_nothing_behind(source: CriteoSource) -> None:
    loader = LookaheadLoader(source, batch_size=2, epochs=1000, workers=1)

    def body() -> None:
        with loader:
            next(loader)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "data.batch_size must be at least 1, got 0"),
        ({"epochs": 0}, "data.epochs must be at least 1, got 0"),
        ({"limit": -1}, "data.limit must be at least 0, got -1"),
        ({"workers": -1}, "data.workers must be at least 0, got -1"),
        ({"eval_fraction": 1.0}, "data.eval_fraction must be at least 0 and below 1, got 1.0"),
        ({"eval_fraction": -0.1}, "data.eval_fraction must be at least 0 and below 1, got -0.1"),
        ({"phase": "test"}, "phase must be train or eval, got 'test'"),
    ],
)
def test_settings_out_of_range_are_refused(source: CriteoSource, change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"batch_size": 8, **change}
    with pytest.raises(InputError, match=message):
        LookaheadLoader(source, **settings)


def test_open_loader_follows_the_configuration(source: CriteoSource) -> None:
    config = DataConfig(path=source.files[0], format="criteo-tsv", batch_size=16, limit=50, epochs=2, workers=0)
    assert sum(batch.num_examples for batch in read_all(open_loader(config, seed=0))) == 90
    assert rows_of(read_all(open_loader(config, seed=0, phase="eval"))) == [45, 46, 47, 48, 49]


def test_must_be_entered(source: CriteoSource) -> None:
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        next(LookaheadLoader(source, batch_size=1))


SCRIPT = """
import signal
import sys
from data.criteo import CriteoSource
from data.loader import LookaheadLoader

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite started in the background ignores it
    source = CriteoSource(files=(sys.argv[1],), block_bytes=700)
    with LookaheadLoader(source, batch_size=2, epochs=10**9, workers=2) as loader:
        next(loader)
        print("ready", *(process.pid for process in __import__("multiprocessing").active_children()), flush=True)
        for _ in loader:
            pass
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(source: CriteoSource, tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "reads.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, str(script), source.files[0]],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        word, *workers = process.stdout.readline().split()
        assert word == "ready"
        assert workers
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)  # as a terminal does: to parent and workers
        else:
            process.kill()
        # The workers hold the write end of this pipe: it reads as closed only when all of them are gone.
        errors = process.stderr.read()
    if sent == signal.SIGINT:
        assert errors.count("Traceback") == 1, errors
        assert "KeyboardInterrupt" in errors


@pytest.mark.parametrize("path", real_samples(), ids=str)
def test_the_real_sample_resumes(path: Path) -> None:
    source = CriteoSource.at(str(path))
    check_resume(lambda state: LookaheadLoader(source, batch_size=8192, shuffle=True, limit=40_000, state=state))


def test_evaluation_files_are_read_whole_and_once(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.tsv", tmp_path / "test.tsv"
    train.write_bytes(criteo_lines(30))
    held_out.write_bytes(criteo_lines(25, seed=1))
    config = DataConfig(
        format="criteo-tsv", path=str(train), eval_path=str(held_out), eval_fraction=0.0, limit=10, epochs=3,
        shuffle=True, batch_size=10, workers=0,
    )  # fmt: skip
    expected = read_all(LookaheadLoader(CriteoSource.at(str(held_out)), batch_size=10))
    assert_same_batches(read_all(open_loader(config, seed=0, phase="eval")), expected)
    assert sum(batch.num_examples for batch in read_all(open_loader(config, seed=0))) == 30
    with pytest.raises(InputError, match="own_files is of the phase eval"):
        LookaheadLoader(CriteoSource.at(str(train)), batch_size=10, own_files=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment": 99}, r"loader state: expected a segment below \d+, got 99"),
        ({"block": 99}, r"loader state: .* has no block 99"),
        ({"row": 10**6}, r"loader state: expected at most \d+ rows of block 0 of segment 0, got 1000000"),
    ],
)
@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"shuffle": True, "shuffle_buffer": 20}, {"eval_fraction": 0.5}]
)
def test_a_state_of_a_place_that_the_data_does_not_have(
    source: CriteoSource, change: dict[str, int], message: str, options: dict[str, Any]
) -> None:
    """The loader has no way to see it before it reads."""
    options = {**options, "batch_size": 7, "phase": "eval" if "eval_fraction" in options else "train"}
    with LookaheadLoader(source, **options) as loader:
        state = {**loader.state(), **change}
    with LookaheadLoader(source, state=state, **options) as loader, pytest.raises(InputError, match=message):
        list(loader)
