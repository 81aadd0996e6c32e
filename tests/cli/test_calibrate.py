from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.cli.main import main
from bagpipe.cluster.cluster_file import load_cluster


@pytest.mark.slow
@pytest.mark.redis
def test_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "machine.toml"
    assert main(["calibrate", "--ranks", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: this machine, 1 ranks\n"
    assert load_cluster(str(out)).num_ranks == 1


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_a_bad_number_of_ranks(ranks: str, capsys: pytest.CaptureFixture[str]):
    assert main(["calibrate", "--ranks", ranks]) == 2
    assert f"--ranks: expected at least 1, got {ranks}" in capsys.readouterr().err
