from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.checkpoint.best import Best, read_best, write_best
from bagpipe.errors import InputError


def test_the_newest_name_counts(tmp_path: Path) -> None:
    assert read_best(tmp_path) is None
    for step in (10, 30):
        write_best(tmp_path, Best(generation=2, step=step, metric="auc", value=0.75))
    best = read_best(tmp_path)
    assert best is not None
    assert best.position == (2, 30)
    assert (tmp_path / "best.json").read_text() == '{"generation": 2, "step": 30, "metric": "auc", "value": 0.75}\n'


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"generation": 1, "step": "x", "metric": "auc", "value": 1}'])
def test_a_file_that_names_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(InputError, match=r"best\.json does not name a checkpoint"):
        read_best(tmp_path)
