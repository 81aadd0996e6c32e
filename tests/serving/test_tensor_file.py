"""Files are those of the safetensors package, in both directions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bagpipe.errors import InputError
from bagpipe.serving.table_tensors import specs_of, words_of
from bagpipe.serving.tensor_file import TensorFile, TensorFileWriter, checksum_of

TENSORS = {
    "a.weight": torch.rand(5, 3),
    "b": torch.rand(2, 2, dtype=torch.float64),
    "c.ids": torch.tensor([3, -1]),
    "d": torch.rand(3, 1).to(torch.bfloat16),
    "e": torch.rand(7).half(),
    "f": torch.tensor([1, 255], dtype=torch.uint8),
    "g": torch.tensor(True),
    "h": torch.empty(0, 4),
}


def write(path: Path) -> dict[str, str]:
    words = {name: words_of(tensor) for name, tensor in TENSORS.items()}
    with TensorFileWriter(path, specs_of(words), {"step": "7"}) as file:
        for name in reversed(words):
            file.write(name, words[name].values)
    assert path.stat().st_size == file.num_bytes
    return file.checksums


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    checksums = write(tmp_path / "one")
    found = load_file(tmp_path / "one")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert checksums["b"] == hashlib.sha256(TENSORS["b"].numpy().tobytes()).hexdigest()
    write(tmp_path / "again")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "again").read_bytes()


def test_what_safetensors_writes_is_mapped(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "file", metadata={"step": "7"})
    file = TensorFile(tmp_path / "file")
    (tmp_path / "file").unlink()
    assert file.metadata == {"step": "7"}
    for name, tensor in TENSORS.items():
        expected = words_of(tensor)
        assert file.specs[name].dtype == expected.dtype
        np.testing.assert_array_equal(file.words(name), expected.values)
        assert checksum_of(file.words(name)) == checksum_of(expected.values)


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path)
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    header["a.weight"]["data_offsets"][1] -= 4
    moved = json.dumps(header).encode()
    contents = [b"", whole[:5], whole[:40], whole[:-1], whole + b"1", b"\xff" * 64]
    contents += [len(text).to_bytes(8, "little") + text for text in (b"[1]", b'{"a": 1}', b"no", moved)]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"^[^\n]*file: [^\n]*$"):
            TensorFile(path)
    with pytest.raises(InputError, match="No such file"):
        TensorFile(tmp_path / "none")
