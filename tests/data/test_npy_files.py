from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bagpipe.errors import InputError
from data.npy_files import map_array, member_names

ARRAYS: dict[str, NDArray[Any]] = {
    "0": np.arange(6, dtype=np.int32).reshape(3, 2),
    "1": np.asfortranarray(np.arange(6.0).reshape(3, 2)),
    "long name": np.arange(5, dtype=np.uint8),
    "none": np.zeros((0, 4), np.int64),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_file_is_mapped(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "a.npy", ARRAYS[name])
    found = map_array(str(tmp_path / "a.npy"))
    assert (found.dtype, found.tolist()) == (ARRAYS[name].dtype, ARRAYS[name].tolist())
    assert not found.size or isinstance(found, np.memmap)


def test_members_of_an_archive_are_mapped_in_place(tmp_path: Path) -> None:
    path = str(tmp_path / "a.npz")
    np.savez(path, **ARRAYS)
    assert member_names(path) == tuple(ARRAYS)
    for name, array in ARRAYS.items():
        found = map_array(path, name)
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
        if found.size:
            assert isinstance(found, np.memmap)
            assert str(found.filename) == path


def test_a_changed_file_is_mapped_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, ARRAYS["0"])
    assert map_array(str(path)) is map_array(str(path))
    np.save(tmp_path / "b.npy", ARRAYS["1"])
    (tmp_path / "b.npy").replace(path)
    assert map_array(str(path)).tolist() == ARRAYS["1"].tolist()


def test_unusable_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = str(tmp_path / "a.npy")
    cases: list[tuple[bytes, str]] = [(b"", "expected a NumPy array"), (b"text" * 20, "expected a NumPy array")]
    np.save(path, ARRAYS["0"])
    whole = Path(path).read_bytes()
    cases += [(whole[:-1], "the file is cut short"), (whole[:20], "expected a NumPy array")]
    np.save(path, np.array([None]), allow_pickle=True)
    cases.append((Path(path).read_bytes(), "expected numbers, got Python objects"))
    for content, message in cases:
        Path(path).write_bytes(content)
        with pytest.raises(InputError, match=f"{re.escape(path)}: {message}|{re.escape(path)}: .*{message}") as caught:
            map_array(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"cannot read .*none\.npy: No such file"):
        map_array(str(tmp_path / "none.npy"))


def test_unusable_archives_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.npz")
    np.savez_compressed(path, **ARRAYS)
    with pytest.raises(InputError, match=r"array '0': expected an uncompressed archive, .* write it with np\.savez"):
        map_array(path, "0")
    np.savez(path, **ARRAYS)
    with pytest.raises(InputError, match="array '7': the archive has no such array"):
        map_array(path, "7")
    Path(path).write_bytes(Path(path).read_bytes()[:-30])
    with pytest.raises(InputError, match=r"expected a \.npz archive: File is not a zip file"):
        member_names(path)
