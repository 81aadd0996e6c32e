"""The notebook runs from top to bottom, and is stored without outputs.

The environment has no Jupyter: the standard library alone reads the notebook and runs its code cells in one namespace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.redis
def test_the_notebook_runs(capsys):
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(cells()):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), namespace)
    losses = namespace["losses"]
    assert len(losses) == 100
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert "right: " in capsys.readouterr().out


def test_the_notebook_is_a_notebook_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)
    for cell in notebook["cells"]:
        assert "".join(cell["source"]).strip()
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
