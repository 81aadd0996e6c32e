"""The wheel holds the library with the programs inside, runs as the checkout does, and requires what is documented."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import bagpipe
from bagpipe.config.keys import config_keys
from bagpipe.util.programs import COMMANDS, PROGRAMS
from tests.harness.wheels import build, copy_sources, install

ROOT = Path(__file__).parents[1]
PACKAGES = ("bagpipe", *PROGRAMS)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    copy_sources(copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


def sources(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder.parent).as_posix() for path in files}


def test_the_wheel_holds_the_library_and_the_programs_inside_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert {"bagpipe/py.typed", "bagpipe/__init__.pyi", "bagpipe/client/cacher.proto"} <= names
        dist_info = f"bagpipe_recsys-{bagpipe.__version__}.dist-info"
        assert {name.partition("/")[0] for name in names} == {"bagpipe", dist_info}
        assert {name for name in sources(ROOT / "bagpipe") if name.endswith(".py")} <= names
        programs = {name.removeprefix("bagpipe/programs/") for name in names if name.startswith("bagpipe/programs/")}
        assert programs == {"__init__.py"}.union(*(sources(ROOT / program) for program in PROGRAMS))
        for name in sorted(names):
            if name.endswith(".py"):
                tree = ast.parse(archive.read(name))
                found = imported(tree)
                wanted = {name.partition(".")[0] for name in found}
                assert not wanted & set(PROGRAMS), name
                modules = {item for item in found if item.startswith("bagpipe.programs.")}
                for module in modules:  # a module, or a package
                    path = module.replace(".", "/")
                    assert {f"{path}.py", f"{path}/__init__.py"} & names, module


def imported(tree: ast.Module) -> set[str]:
    """Modules of all absolute import statements."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    return found


def test_no_text_names_a_module_of_a_program():
    """The wheel's build renames imports only; configuration keys such as data.shuffle_buffer are no modules."""
    modules = {name.removesuffix(".py").replace("/", ".") for program in PROGRAMS for name in sources(ROOT / program)}
    modules -= {key.path for key in config_keys()}
    wrong = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
    assert not wrong


def test_a_source_distribution_builds_the_same_wheel(checkout, wheel, tmp_path):
    (tmp_path / "sdist").mkdir()
    with tarfile.open(build("sdist", checkout, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "wheel").mkdir()
    with zipfile.ZipFile(build("wheel", folder, tmp_path / "wheel")) as again, zipfile.ZipFile(wheel) as first:
        contents = [{item.filename: item.CRC for item in archive.infolist()} for archive in (again, first)]
        assert contents[0] == contents[1]


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in an environment of its own, which borrows the packages of this one.

    A user works there, on a model: with a package and modules that have the programs' names.
    """
    folder = tmp_path_factory.mktemp("outside")
    install(wheel, folder / "venv")
    (folder / "data").mkdir()
    (folder / "data" / "__init__.py").write_text("")
    (folder / "data" / "widths.py").write_text("TOP = (16,)\n")
    for name in ("trainer", "cacher"):
        (folder / f"{name}.py").write_text("raise AssertionError('the program imports a module of the user')\n")
    (folder / "towers.py").write_text(_FACTORY)
    return folder


_FACTORY = """
from dataclasses import replace

from bagpipe.models.torchrec_models import build_model
from data.widths import TOP


def build(schema, config):
    return build_model(schema, replace(config, factory="", top_mlp=TOP))
"""

_JOB = ["--data.limit", "6000", "--data.batch_size", "256", "--run.steps", "20", "--run.log_format", "json"]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder. Nothing leads to the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def digests(command: list[str], folder: Path, name: str) -> tuple[str, str]:
    """Digests of a training program's result."""
    done = run([*command, *_JOB, "--result", str(folder / name)], ROOT if "trainer" in command else folder)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / name).read_text())
    assert result["steps"] == 20
    return result["dense_digest"], result["embedding_digest"]


@pytest.mark.multiproc
def test_the_commands_run_outside_the_checkout(outside):
    """Every program starts, and its package and modules are not those that the user has there."""
    for words, code, told in (
        (["--help"], 0, tuple(COMMANDS)),
        (["cacher", "--help"], 0, ("usage: bagpipe cacher ",)),
        (["data", "synth", "--rows", "10", "--out", "ten.tsv"], 0, ("ten.tsv: 10 rows",)),
        (["train", "--nowhere", "x"], 2, ("error: unknown option --nowhere",)),
    ):
        done = run([str(outside / "venv/bin/bagpipe"), *words], outside)
        assert done.returncode == code, done.stderr
        assert all(text in done.stdout + done.stderr for text in told)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.multiproc
@pytest.mark.redis
def test_the_wheel_trains_as_the_checkout_does(outside, tmp_path):
    python, console = str(outside / "venv/bin/python"), [str(outside / "venv/bin/bagpipe"), "train"]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
    found = digests([sys.executable, "-m", "trainer"], outside, "checkout.json")
    assert digests(console, outside, "wheel.json") == found
    assert digests([python, *ranks, "-m", "bagpipe.train"], outside, "torchrun.json") == found
    own = digests([*console, "--model.factory", "towers:build"], outside, "own.json")
    assert own != found
    assert digests([sys.executable, "-m", "trainer", "--model.top_mlp", "16"], outside, "same.json") == own


def test_the_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"bagpipe_recsys-{bagpipe.__version__}.dist-info/METADATA").decode()
    metadata = Parser().parsestr(text)
    assert metadata["Name"] == "bagpipe-recsys"
    assert metadata["Version"] == bagpipe.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    core = [item for item in metadata.get_all("Requires-Dist") if "extra ==" not in item]
    assert sorted(re.split("[<>]", item)[0] for item in core) == ["numpy", "safetensors", "torch", "xxhash"]


def test_the_wheel_imports_by_itself(wheel):
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import bagpipe; print(bagpipe.__file__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout.startswith(str(wheel)), done.stderr


_PLANNED = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.batch import Batch

spec = OracleSpec(table_rows=(100,), features=(FeatureRef(feature=0, table=0),), num_slots=20, lookahead=3)
ids, ones = np.arange(4), np.ones((1, 4), np.int32)
empty, labels = np.empty((4, 0), np.float32), np.zeros(4, np.float32)
batches = [Batch(index=n, dense=empty, values=ids + n, lengths=ones, labels=labels) for n in range(5)]
with PlannerProcess(spec) as planner:
    print([part.batch.index for part in planner.run(batches)], sys.modules["bagpipe"].__file__)
assert "torch" not in sys.modules
"""


@pytest.mark.multiproc
def test_the_planner_process_starts_from_the_wheel(wheel, tmp_path):
    command = [sys.executable, "-P", "-c", _PLANNED, str(wheel)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.stdout.startswith("[0, 1, 2, 3, 4]"), done.stderr
    assert str(wheel) in done.stdout


def test_one_extra_has_all_that_a_train_pipeline_needs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["train"] == ["bagpipe-recsys[kernels,store,torchrec-deps]"]
    assert {"kernels", "store", "torchrec-deps"} <= extras.keys()


def test_no_extra_requires_torchrec_or_fbgemm():
    """Their metadata does not name a compatible torch, so pip must never choose them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    assert not [item for item in wanted if item.lower().startswith(("torchrec", "fbgemm"))]
