"""Names that `checkpoint.start_from` refuses. The tests of the sources have those that it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.start_from.open_source import open_source
from tests.checkpoint.samples import three_checkpoints


def test_a_source_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    folder, pickled, broken = tmp_path / "a", tmp_path / "m.pt", tmp_path / "m.safetensors"
    three_checkpoints(folder)
    pickled.write_bytes(b"")
    broken.write_bytes(b"no header")
    key = "checkpoint.start_from"
    kinds = "a folder of checkpoints, a folder of torch.distributed.checkpoint, or safetensors files"
    for where, line in (
        ("none", f"{key} none: there is no none"),
        (f"{folder}@5", f"{key} {folder} has no whole checkpoint of step 5, it has steps 10, 20, 30"),
        (f"{folder}@best", f"{key} {folder} has no whole checkpoint of a best evaluation"),
        (f"{tmp_path}@3", f"{key} {tmp_path}@3: @3 needs a folder of checkpoints, {tmp_path} is none"),
        (f"{folder}/generation-000001", f"{key} {folder}/generation-000001: expected {kinds}"),
        (
            f"{pickled}",
            f"{key} {pickled} is a file of torch.save, which is a pickle and is not read: convert its state",
        ),
        (f"{broken}", f"{broken} cannot be read as safetensors: "),
    ):
        with pytest.raises(InputError, match=re.escape(line)) as caught:
            open_source(where)
        assert "\n" not in str(caught.value)
