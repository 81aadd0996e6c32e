"""Checkpoints in a bucket: uploads that are killed, and whole jobs that resume from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.mirror import CheckpointMirror
from tests.checkpoint.samples import three_checkpoints
from tests.data.files import criteo_lines
from tests.files.s3_server import Proxy
from tests.system.programs import run_forked

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

UPLOAD = """
import sys
from pathlib import Path
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.mirror import CheckpointMirror

checkpoint = CheckpointFolder(Path(sys.argv[1])).newest(print)
print(flush=True)
CheckpointMirror(sys.argv[2]).upload(checkpoint)
"""


@pytest.mark.parametrize("last", [1, 0])
def test_a_killed_upload_leaves_no_manifest(tmp_path: Path, bucket: str, proxy: Proxy, last: int) -> None:
    folder, checkpoints, _ = three_checkpoints(tmp_path / "jobs")
    num_files = len(list(checkpoints[-1].manifest.files))
    killed_at = last or num_files  # 0: at the last file before the manifest
    put: list[str] = []

    def kill(number: int, method: str, path: str) -> str:
        if method == "PUT":
            put.append(path)
            if len(put) == killed_at:
                os.kill(child.pid, signal.SIGKILL)
        return ""

    proxy.faults = kill
    command = [sys.executable, "-c", UPLOAD, str(folder.path), f"{bucket}/a"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert child.communicate(timeout=250)[0] is not None
    assert child.returncode == -signal.SIGKILL
    proxy.faults = lambda number, method, path: ""
    mirror = CheckpointMirror(f"{bucket}/a")
    assert mirror.positions() == ()
    mirror.upload(checkpoints[-1])
    assert mirror.positions() == (checkpoints[-1].position,)


def train(folder: Path, *flags: str) -> dict[str, Any]:
    result = folder / "result.json"
    arguments = [
        "--config", "trainer/configs/synthetic.toml", "--data.limit", "2000", "--data.batch_size", "100",
        "--run.dir", str(folder / "run"), "--checkpoint.dir", str(folder / "checkpoints"),
        "--checkpoint.every", "5", "--model.embedding_dim", "4", "--model.bottom_mlp", "8,4", "--model.top_mlp", "8,1",
        "--result", str(result), *flags,
    ]  # fmt: skip
    done = run_forked(arguments, folder, dict(os.environ))
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_a_job_on_a_bucket_with_faults_has_the_digests_of_local_files(
    tmp_path: Path, bucket: str, proxy: Proxy
) -> None:
    days = tmp_path / "days"
    days.mkdir()
    for number in range(3):
        (days / f"day_{number}.tsv").write_bytes(criteo_lines(700, seed=number))
        fsspec.filesystem("s3").pipe_file(f"bucket/days/day_{number}.tsv", (days / f"day_{number}.tsv").read_bytes())
    proxy.requests.clear()
    # One request in a hundred, and some of the first.
    proxy.faults = lambda number, method, path: {1: "500", 9: "cut", 20: "slow"}.get(number % 100, "")
    found = []
    for name in (str(days), f"{bucket}/days"):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        flags = ("--data.path", name, "--data.format", "criteo-tsv", "--data.workers", "1", "--run.steps", "10")
        result = train(folder, *flags)
        found.append([result[key] for key in ("dense_digest", "embedding_digest", "auc", "steps")])
    assert found[0] == found[1]
    assert proxy.injected


def test_a_job_goes_on_from_the_mirror_of_another_machine(tmp_path: Path, bucket: str) -> None:
    for name in ("whole", "here", "there"):
        (tmp_path / name).mkdir()
    whole = train(tmp_path / "whole")
    mirror = ("--checkpoint.mirror", f"{bucket}/jobs/a")
    train(tmp_path / "here", *mirror, "--run.steps", "12")
    assert CheckpointMirror(f"{bucket}/jobs/a").positions()[0] == (1, 12)
    later = train(tmp_path / "there", *mirror)
    assert [later[name] for name in ("dense_digest", "embedding_digest", "auc")] == [
        whole[name] for name in ("dense_digest", "embedding_digest", "auc")
    ]
    local = CheckpointFolder(tmp_path / "there" / "checkpoints").positions()
    assert CheckpointMirror(f"{bucket}/jobs/a").positions()[0] == local[0]
