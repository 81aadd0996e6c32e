"""Another base, or a damaged file, is refused. `test_delta` compares what `apply_delta` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.serving.apply import apply_delta
from bagpipe.serving.delta import DELTA_FILE
from bagpipe.serving.manifest import MODEL_FILE
from tests.serving.exports import pair_of


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return pair_of(tmp_path)


def test_another_base_is_refused_in_one_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, delta = pair
    with pytest.raises(InputError, match=r"^.*/B is not the base of this delta: .* \(step 20\), expected .* 10\)$"):
        apply_delta(tmp_path / "B", delta, tmp_path / "out")
    with pytest.raises(InputError, match=r"expected the manifest of an export|cannot be read"):
        apply_delta(delta, delta, tmp_path / "out")
    with pytest.raises(InputError, match=r"cannot be read: No such file"):
        apply_delta(base, base, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(InputError, match=r"OUT .*out is not empty"):
        apply_delta(base, delta, tmp_path / "out")


@pytest.mark.parametrize("where", ["base", "delta"])
def test_a_damaged_file_is_refused_and_nothing_is_left(where: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = pair[0] / MODEL_FILE if where == "base" else pair[1] / DELTA_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last tensor
    path.write_bytes(content)
    with pytest.raises(InputError, match="a file of the base or of the delta is damaged"):
        apply_delta(*pair, tmp_path / "out")
    path.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"expected [0-9]+ bytes"):
        apply_delta(*pair, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
