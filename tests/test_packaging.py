"""The wheel holds the library and nothing else, and its metadata matches the documented requirements."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import bagpipe

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, since building writes next to the sources."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("bagpipe", "data", "cacher", "trainer", "tests", "tools", "benchmarks"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", str(out), str(copy)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_only_the_library(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    dist_info = f"bagpipe_recsys-{bagpipe.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"bagpipe", dist_info}
    assert {"bagpipe/py.typed", "bagpipe/__init__.pyi", "bagpipe/client/cacher.proto"} <= set(names)
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bagpipe").rglob("*.py")}
    assert sources <= set(names)


def test_the_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"bagpipe_recsys-{bagpipe.__version__}.dist-info/METADATA").decode()
    metadata = Parser().parsestr(text)
    assert metadata["Name"] == "bagpipe-recsys"
    assert metadata["Version"] == bagpipe.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    core = [item for item in metadata.get_all("Requires-Dist") if "extra ==" not in item]
    assert sorted(item.partition(">")[0] for item in core) == ["numpy", "safetensors", "torch", "xxhash"]


def test_the_wheel_imports_by_itself(wheel):
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import bagpipe; print(bagpipe.__file__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
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
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
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


def test_every_pin_is_exact_and_the_trio_is_pinned_elsewhere():
    lines = (ROOT / "tools" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(pin.count("==") == 1 for pin in pins)
    assert not [pin for pin in pins if pin.lower().startswith(("torch==", "torchrec==", "fbgemm"))]
