"""Packages that are not installed: named with the command that installs them, by every program."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.util.environment import explain_import
from bagpipe.util.packages import EXTRAS, distribution_of, explain_missing, missing_line, needed_by

ROOT = Path(__file__).parents[2]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", item)[0] for item in requirements}


def test_the_table_is_that_of_the_extras():
    """But for torch, whose releases must fit those of fbgemm, and triton, which torch brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS[""].values()) == names(project["dependencies"]) - {"torch"}
    assert set(EXTRAS["torchrec-deps"].values()) == names(extras["torchrec-deps"])
    assert set(EXTRAS["store"].values()) == names(extras["store"]) | {"hiredis"}
    assert set(EXTRAS["programs"].values()) == names(extras["programs"])
    assert set(EXTRAS["tfrecord"].values()) <= names(extras["tfrecord"])


def test_every_package_is_in_its_distribution():
    homes = importlib.metadata.packages_distributions()
    for packages in EXTRAS.values():
        for name, package in packages.items():
            assert package in {home.replace("_", "-") for home in homes[name.partition(".")[0]]}


def test_modules_of_packages():
    assert distribution_of("grpc._channel") == "grpcio"
    assert distribution_of("google") == distribution_of("google.protobuf.message") == "protobuf"
    assert distribution_of("of_a_user.x") == "of-a-user"


@pytest.mark.parametrize("name", ["grpc_healthy", "of_a_user", "googles", "bagpipe.x"])
def test_other_modules_are_left_alone(name):
    explain_missing(name)
    explain_import(ModuleNotFoundError("No module", name=name))
    explain_import(ImportError("cannot import name", name="grpc"))


def test_all_that_is_missing_is_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(InputError) as caught:
        explain_missing("grpc.aio")
    assert str(caught.value) == missing_line(["grpcio", "plotly"])
    assert missing_line(["grpcio", "plotly"]) == (
        f"the packages grpcio, plotly are not installed; fix: {sys.executable} -m pip install grpcio plotly"
    )


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "command", "package"),
    [
        ("grpc", ["bagpipe", "cacher", "--listen", "unix:/tmp/x"], "grpcio"),
        ("pyarrow", ["data", "replay", "--data.path", "x.parquet", "--data.format", "parquet"], "pyarrow"),
        pytest.param(
            "pyre_extensions",
            ["bagpipe", "plan", "--model", "dlrm", "--devices", "2"],
            "pyre-extensions",
            marks=pytest.mark.slow,
        ),
        pytest.param("redis", ["trainer", "--data.limit", "100"], "redis", marks=pytest.mark.slow),
    ],
)
def test_no_program_ends_in_a_traceback(module, command, package):
    run = (
        f"import runpy, sys; sys.modules[{module!r}] = None; sys.argv = {command!r}; "
        f"runpy.run_module({command[0]!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.stderr.splitlines()[-1].endswith(
        f"error: the package {package} is not installed; fix: {sys.executable} -m pip install {package}"
    ), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_a_package_that_one_flag_needs():
    line = "--report needs the Python package plotty, which is not installed: pip install plotty"
    with pytest.raises(InputError, match=line), needed_by("--report", "plotty"):
        importlib.import_module("plotty")
    with pytest.raises(ModuleNotFoundError, match="another"), needed_by("--report", "plotty"):
        importlib.import_module("another_package")
