"""The bill of materials is valid CycloneDX and names the project and what the locks pin."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import bagpipe
from tools.make_locks import pins
from tools.make_sbom import with_version, write


def components(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["bomFormat"], found["metadata"]["component"]["name"]) == ("CycloneDX", "bagpipe-recsys")
    assert found["metadata"]["component"]["version"] == bagpipe.__version__
    return {item["name"].lower().replace("_", "-").replace(".", "-"): item for item in found["components"]}


def test_it_names_the_locked_packages(tmp_path):
    assert write(tmp_path / "sbom.json", checked=False) == 0
    found = components(tmp_path / "sbom.json")
    locked = {name: pin for file in ("build.txt", "run.txt", "dev.txt") for name, pin in pins(file).items()}
    assert {name: found[name]["version"] for name, pin in locked.items() if " ; " not in pin} == {
        name: pin for name, pin in locked.items() if " ; " not in pin
    }
    assert found["torch"]["version"] == version("torch")
    assert found["numpy"]["purl"].startswith("pkg:pypi/numpy@")


@pytest.mark.slow
def test_it_is_valid_and_the_same_each_time(tmp_path):
    """The tool compares it with CycloneDX's schema, and writes nothing that does not fit."""
    assert write(tmp_path / "first.json") == 0
    assert write(tmp_path / "second.json", checked=False) == 0
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    assert components(tmp_path / "first.json")


def test_a_version_that_is_not_dynamic_is_refused():
    with pytest.raises(ValueError, match="expected one line dynamic"):
        with_version('version = "1"\n')
