"""The files of a sweep for tests of the command."""

from __future__ import annotations

from pathlib import Path

from bagpipe.cluster.cluster_file import to_toml
from tests.cluster.clusters import cluster
from tests.forecast.jobs import replay
from tests.partition.graphs import towers

__all__ = ["sweep_flags"]


def sweep_flags(folder: Path) -> list[str]:
    """Write a replay, a model and a cluster; the command with their flags."""
    (folder / "replay.json").write_text(replay(), encoding="utf-8")
    (folder / "dense.json").write_text(towers(1, 2).to_json(), encoding="utf-8")
    (folder / "cluster.toml").write_text(to_toml(cluster()), encoding="utf-8")
    named = {"--replay": "replay.json", "--model": "dense.json", "--cluster": "cluster.toml"}
    return ["sweep", *(word for flag, name in named.items() for word in (flag, str(folder / name)))]
