from __future__ import annotations

from pathlib import Path

from bagpipe.util.host_memory import free_memory_bytes


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_least_of_the_host_and_all_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert free_memory_bytes(proc, groups) is None, "not Linux"
    _write(proc / "meminfo", "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    assert free_memory_bytes(proc, groups) == 1_024_000
    _write(proc / "self" / "cgroup", "4:memory:/job\n1:cpu:/\n0::/slice/job\n")
    assert free_memory_bytes(proc, groups) == 1_024_000, "no limits"
    _write(groups / "slice" / "job" / "memory.max", "max\n")
    _write(groups / "slice" / "memory.max", "900000\n")
    _write(groups / "slice" / "memory.current", "500000\n")
    _write(groups / "slice" / "memory.stat", "anon 300000\ninactive_file 100000\n")
    assert free_memory_bytes(proc, groups) == 500_000, "files in memory can be dropped"
    _write(groups / "memory" / "job" / "memory.limit_in_bytes", "400000\n")
    _write(groups / "memory" / "job" / "memory.usage_in_bytes", "150000\n")
    assert free_memory_bytes(proc, groups) == 250_000, "version 1"


def test_this_machine() -> None:
    assert (free_memory_bytes() or 1) > 0
