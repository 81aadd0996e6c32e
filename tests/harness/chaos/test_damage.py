from __future__ import annotations

import os
from pathlib import Path

from tests.harness.chaos.damage import checkpoints_at, damage_newest


def write_checkpoint(folder: Path, generation: int, step: int) -> Path:
    target = folder / f"generation-{generation:06d}" / f"step-{step:08d}"
    target.mkdir(parents=True)
    (target / "manifest.json").write_text(f"manifest {step}")
    (target / "rows.npy").write_text(f"rows {step}")
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_checkpoint_is_of_the_latest_generation(tmp_path: Path) -> None:
    expected = [
        write_checkpoint(tmp_path, 1, 500),
        write_checkpoint(tmp_path, 2, 40),
        write_checkpoint(tmp_path, 2, 50),
    ]
    (tmp_path / "generation-000003" / "step-00000050").mkdir(parents=True)
    assert checkpoints_at(tmp_path) == expected


def test_one_checkpoint_stays_whole(tmp_path: Path) -> None:
    assert damage_newest(tmp_path, 0.5, set()) == ""
    oldest, *_, newest = (write_checkpoint(tmp_path, 1, step) for step in (10, 20, 30))
    damaged: set[Path] = set()
    assert damage_newest(tmp_path, 0.1, damaged)
    assert damaged == {newest}
    assert damage_newest(tmp_path, 0.2, damaged)
    assert damage_newest(tmp_path, 0.3, damaged) == ""
    assert oldest not in damaged


def test_damage_hits_only_files_of_the_newest_checkpoint(tmp_path: Path) -> None:
    done = set()
    for number in range(60):
        folder = tmp_path / str(number)
        older, newer = write_checkpoint(folder, 1, 10), write_checkpoint(folder, 1, 20)
        os.link(older / "rows.npy", newer / "base.npy")
        before = contents(folder)
        words = damage_newest(folder, number / 60, set())
        after = contents(folder)
        changed = {name for name in before if after.get(name) != before[name]}
        assert changed
        assert changed <= {"generation-000001/step-00000020/manifest.json", "generation-000001/step-00000020/rows.npy"}
        assert words == damage_of_a_copy(tmp_path, number)
        done.add(words.split()[1])
    assert done == {"flipped", "cut", "emptied", "removed", "and"}


def damage_of_a_copy(tmp_path: Path, number: int) -> str:
    """Equal choices give equal damage."""
    folder = tmp_path / f"copy {number}"
    older, newer = write_checkpoint(folder, 1, 10), write_checkpoint(folder, 1, 20)
    os.link(older / "rows.npy", newer / "base.npy")
    return damage_newest(folder, number / 60, set())
