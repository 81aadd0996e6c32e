"""RedisTable of tensorflow-recommenders-addons, run by a python that has it: one line per call, one line per answer.

    PYTHON benchmarks/store/tfra_table.py FOLDER HOST PORT       FOLDER: tables.npy, ids.npy, rows.npy
    answers "ready VERSIONS"; then reads "write" and "read", answers the seconds of the call

Arguments are tensors made in advance. A lookup's rows stay a tensor. One RedisTable per table number, in turn, because
an operation has one table.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def settings(host: str, port: int) -> dict[str, Any]:
    """The defaults of RedisTableConfig but for the address, the model's name, and rows that stay in the server."""
    return {
        "redis_connection_mode": 2,
        "redis_master_name": "master",
        "redis_host_ip": [host],
        "redis_host_port": [port],
        "redis_user": "default",
        "redis_password": "",
        "redis_db": 0,
        "redis_read_access_slave": False,
        "redis_connect_keep_alive": False,
        "redis_connect_timeout": 1000,
        "redis_socket_timeout": 1000,
        "redis_conn_pool_size": 20,
        "redis_wait_timeout": 100_000_000,
        "redis_connection_lifetime": 100,
        "storage_slice_import": -1,
        "storage_slice": 1,
        "using_hash_storage_slice": False,
        "keys_sending_size": 1024,
        "using_md5_prefix_name": False,
        "redis_hash_tags_hypodispersion": False,
        "model_tag_import": "bench-tfra",
        "redis_hash_tags_import": [],
        "model_tag_runtime": "bench-tfra",
        "redis_hash_tags_runtime": [],
        "expire_model_tag_in_seconds": 604_800,
        "table_store_mode": 2,
        "model_lib_abs_dir": "/tmp/",
    }


def main(folder: Path, host: str, port: int) -> None:
    """Serve the calls named on standard input."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_USE_LEGACY_KERAS="1")
    tensorflow = importlib.import_module("tensorflow")
    addons = importlib.import_module("tensorflow_recommenders_addons")
    config = folder / "config.json"
    config.write_text(json.dumps(settings(host, port)), encoding="utf-8")
    numbers, ids, rows = (np.load(folder / f"{name}.npy") for name in ("tables", "ids", "rows"))
    parts = []
    for number in np.unique(numbers):
        of = numbers == number
        table = addons.dynamic_embedding.RedisTable(
            tensorflow.int64,
            tensorflow.float32,
            tensorflow.zeros([rows.shape[1]], tensorflow.float32),
            name=f"bench-{number}-{rows.shape[1]}",
            config=addons.dynamic_embedding.RedisTableConfig(redis_config_abs_dir=str(config)),
        )
        parts.append((table, tensorflow.constant(ids[of]), tensorflow.constant(rows[of])))

    def write() -> list[Any]:
        return [table.insert(keys, values) for table, keys, values in parts]

    def read() -> list[Any]:
        return [table.lookup(keys) for table, keys, _ in parts]

    write()
    equal = all((found.numpy() == values.numpy()).all() for found, (_, _, values) in zip(read(), parts, strict=True))
    if not equal:
        raise SystemExit("RedisTable returned other rows than were written")
    print(f"ready tensorflow {tensorflow.__version__}, tensorflow-recommenders-addons {addons.__version__}", flush=True)
    calls = {"write": write, "read": read}
    for line in sys.stdin:
        start_s = time.perf_counter()
        calls[line.strip()]()
        print(time.perf_counter() - start_s, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
