"""Files that a reader of the pages has before their commands: ``python -m tests.docs.given NAME PATH`` makes it.

text, dataset, records, arrays, columns    the example files of docs/data-formats.md, by its own blocks, in a folder
films                                      ratings and films of MovieLens' layout, in a folder
job, operators, costs                      a configuration, an operator graph, and measured costs: files
log                                        lines of Criteo's format: a file, then their number and a seed
store                                      a server, whose URL is then in a file; until it is stopped
redis-cli                                  one command for that server, as redis-cli prints it
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import redis

from bagpipe.store.server.embedded import EmbeddedServer
from data.cli import main as data
from tests.data.documented import documented
from tests.data.files import save_to_disk, write_examples
from tests.docs.pages import ROOT, blocks

__all__ = ["main"]


def _text(folder: Path) -> None:
    (text,), (schema,) = documented("Separated text", "text"), documented("Separated text", "toml")
    (folder / "clicks.csv").write_text(text)
    (folder / "clicks.toml").write_text(schema)


def _dataset(folder: Path) -> None:
    tags = [[number, 7] for number in range(50)]
    users = [f"u{number % 9}" for number in range(50)]
    table = pa.table(
        {"click": [0, 1] * 25, "price": [float(number) for number in range(50)], "user": users, "tags": tags}
    )
    save_to_disk(table, folder / "clicks")
    (folder / "clicks.toml").write_text(documented("Hugging Face's datasets", "toml")[0])


def _records(folder: Path) -> None:
    write_examples(
        folder / "clicks.tfrecord", [{"click": 1, "price": 3.0, "user": "u1", "tags": [5], "tag_weight": [1.0]}]
    )
    (folder / "clicks.toml").write_text(documented("TFRecord", "toml")[0])


def _arrays(folder: Path) -> None:
    _run(documented("MLPerf's arrays", "python")[0], folder)
    (folder / "tables.toml").write_text(documented("MLPerf's arrays", "toml")[0])


def _columns(folder: Path) -> None:
    _run(documented("Bring your own data", "python")[0], folder)
    (folder / "clicks.toml").write_text(documented("Bring your own data", "toml")[0])


def _run(code: str, folder: Path) -> None:
    """Run a block of Python of a page in a folder."""
    os.chdir(folder)
    exec(compile(code, "a block of the page", "exec"), {})  # as tests/data do


def _films(folder: Path) -> None:
    (folder / "movies.csv").write_text("movieId,title,genres\n1,A,Drama\n2,B,Comedy|Drama\n")
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,5.0,30\n1,2,2.0,10\n2,1,4.0,20\n")


def _log(path: Path) -> None:
    rows = sys.argv[3] if len(sys.argv) > 3 else "20000"
    seed = sys.argv[4] if len(sys.argv) > 4 else "0"
    made = path.with_name(path.name + ".made.tsv")
    assert data(["synth", "--rows", rows, "--seed", seed, "--out", str(made)]) == 0
    made.rename(path)


def _job(path: Path) -> None:
    text = (ROOT / "trainer/configs/synthetic.toml").read_text()
    path.write_text(re.sub(r"limit = [\d_]+", "limit = 20_000", text))


def _operators(path: Path) -> None:
    path.write_text(next(block for block in blocks("docs/partition.md", "json")))


def _costs(path: Path) -> None:
    path.write_text(json.dumps({f"{stage}{op}": [1.0, 1.5, 1.25] for stage in range(4) for op in "FB"}))


def _store(path: Path) -> None:
    with EmbeddedServer(path.with_suffix("")) as server:
        partial = path.with_suffix(".partial")
        partial.write_text(server.url)
        partial.rename(path)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


def _redis_cli(path: Path) -> None:
    with redis.Redis.from_url(path.read_text()) as client:
        answer = client.execute_command(*sys.argv[3:])
    sys.stdout.write(f"{answer!r}\n")
    assert answer, f"expected an answer to {' '.join(sys.argv[3:])}"


_MAKERS: dict[str, Callable[[Path], None]] = {
    "arrays": _arrays,
    "columns": _columns,
    "costs": _costs,
    "dataset": _dataset,
    "films": _films,
    "job": _job,
    "log": _log,
    "operators": _operators,
    "records": _records,
    "redis-cli": _redis_cli,
    "store": _store,
    "text": _text,
}


def main() -> None:
    name, path = sys.argv[1:3]
    if name == "store":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # its threads inherit it
    _MAKERS[name](Path(path).absolute())


if __name__ == "__main__":
    main()
