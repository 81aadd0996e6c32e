"""Compatible versions of torch, fbgemm and torchrec: fabricated sets, then the test environment itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.util.environment import (
    RECOMMENDED,
    TRIOS,
    Installed,
    check_environment,
    check_import,
    find_problem,
    install_commands,
    read_installed,
)

CPU_213 = (
    "python -m pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu && "
    "python -m pip install fbgemm-gpu-cpu==1.8.0 && python -m pip install --no-deps torchrec==1.9.2"
)


def installed(
    torch: str | None = "2.13.0+cpu", cpu: str | None = "1.8.0", cuda: str | None = None, torchrec: str | None = "1.9.2"
) -> Installed:
    return Installed(torch=torch, fbgemm_gpu=cuda, fbgemm_gpu_cpu=cpu, torchrec=torchrec)


@pytest.mark.parametrize("trio", TRIOS, ids=lambda trio: trio.torch)
def test_every_listed_trio_fits(trio):
    assert find_problem(installed(f"{trio.torch}+cpu", trio.fbgemm, None, trio.torchrec)) is None
    assert find_problem(installed(trio.torch, None, trio.fbgemm, trio.torchrec), device="cuda:1") is None


@pytest.mark.parametrize(
    ("versions", "line"),
    [
        (installed(torch=None), f"torch is not installed; fix: {CPU_213}"),
        (
            installed(torch="2.15.0"),
            f"torch 2.15.0 is installed, but fbgemm is built for torch 2.11, 2.12, 2.13, 2.14 only; fix: {CPU_213}",
        ),
        (
            installed(cpu="1.7.0"),
            "fbgemm-gpu-cpu 1.7.0 is installed, but torch 2.13.0+cpu fits fbgemm 1.8 only; fix: "
            "python -m pip install fbgemm-gpu-cpu==1.8.0 && python -m pip install --no-deps torchrec==1.9.2",
        ),
        (
            installed(torch="2.13.0", cpu=None, cuda="1.9.0"),
            "fbgemm-gpu 1.9.0 is installed, but torch 2.13.0 fits fbgemm 1.8 only; fix: "
            "python -m pip install fbgemm-gpu==1.8.0 && python -m pip install --no-deps torchrec==1.9.2",
        ),
        (
            installed(cpu=None),
            "no fbgemm is installed, but torch 2.13.0+cpu fits fbgemm 1.8 only; fix: "
            "python -m pip install fbgemm-gpu-cpu==1.8.0 && python -m pip install --no-deps torchrec==1.9.2",
        ),
        (
            installed(cuda="1.8.0"),
            "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.8.0 are both installed, and both provide fbgemm_gpu; fix: "
            "python -m pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && python -m pip install fbgemm-gpu-cpu==1.8.0 && "
            "python -m pip install --no-deps torchrec==1.9.2",
        ),
        (
            installed(torchrec=None),
            "no torchrec is installed, but torch 2.13.0+cpu with fbgemm 1.8 fits torchrec 1.6 to 1.9; fix: "
            "python -m pip install --no-deps torchrec==1.9.2",
        ),
        (
            installed(torch="2.11.0", cpu="1.6.0"),
            "torchrec 1.9.2 is installed, but torch 2.11.0 with fbgemm 1.6 fits torchrec 1.6; fix: "
            "python -m pip install --no-deps torchrec==1.6.1",
        ),
    ],
)
def test_a_set_that_does_not_fit_gets_one_line_with_the_fix(versions, line):
    assert find_problem(versions) == line


@pytest.mark.parametrize(
    ("versions", "start"),
    [
        (installed(), "device cuda needs a CUDA build of torch, but torch 2.13.0+cpu is a CPU build; fix: "),
        (installed(torch="2.13.0"), "a cuda device needs fbgemm-gpu, but fbgemm-gpu-cpu 1.8.0 is installed; fix: "),
    ],
)
def test_a_cuda_device_requires_cuda_builds(versions, start):
    problem = find_problem(versions, device="cuda")
    assert problem is not None
    assert problem.startswith(start + "python -m pip uninstall -y ")
    assert "fbgemm-gpu==1.8.0" in problem


@pytest.mark.parametrize("odd", ["", "unknown", "2", "v2.13"])
def test_a_version_that_does_not_look_like_one_fits_nothing(odd):
    assert find_problem(installed(torch=odd)) is not None
    assert find_problem(installed(cpu=odd)) is not None
    assert find_problem(installed(torchrec=odd)) is not None


def test_patch_and_nightly_releases_count_as_their_minor():
    assert find_problem(installed("2.13.1+cu130", None, "1.8.3", "1.9.0"), device="cuda") is None


def test_the_environment_of_the_tests_fits():
    check_environment()
    assert (read_installed().torch or "").startswith(RECOMMENDED.torch)


def test_a_wrong_set_is_an_input_error(monkeypatch):
    monkeypatch.setattr("bagpipe.util.environment.read_installed", lambda: installed(cpu="1.9.0"))
    with pytest.raises(InputError) as caught:
        check_environment()
    assert str(caught.value) == (
        f"fbgemm-gpu-cpu 1.9.0 is installed, but torch 2.13.0+cpu fits fbgemm 1.8 only; fix: {sys.executable} -m pip "
        f"install fbgemm-gpu-cpu==1.8.0 && {sys.executable} -m pip install --no-deps torchrec==1.9.2"
    )


def test_the_check_imports_none_of_the_packages():
    code = (
        "import sys; from bagpipe.util.environment import check_environment; check_environment(); "
        "print(sorted({'torch', 'torchrec', 'fbgemm_gpu', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "package", "statement", "line"),
    [
        (
            "pyre_extensions",
            "pyre-extensions",
            "import bagpipe; bagpipe.TrainPipeline",
            "the package {fix} (the extra `train` of bagpipe-recsys names all that TrainPipeline needs)",
        ),
        (
            "redis",
            "redis",
            "from bagpipe.store.open import open_store; open_store('redis://host', namespace='n', schema=None)",
            "store.url names servers: the package {fix}",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_command(module, package, statement, line):
    code = f"import sys; sys.modules[{module!r}] = None; {statement}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    fix = f"{package} is not installed; fix: {sys.executable} -m pip install {package}"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"bagpipe.errors.InputError: {line.format(fix=fix)}"


def test_errors_of_other_causes_are_left_alone():
    check_import(ImportError("cannot import name 'x'"))
    check_import(ModuleNotFoundError("No module named 'bagpipe.x'", name="bagpipe.x"))


def test_pip_may_only_choose_a_torch_that_a_trio_fits():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (torch,) = (item for item in project["dependencies"] if item.startswith("torch"))
    minors = [tuple(map(int, trio.torch.split(".")[:2])) for trio in TRIOS]
    assert minors == [(2, minor) for minor in range(minors[0][1], minors[-1][1] + 1)]
    assert torch == f"torch>=2.{minors[0][1]},<2.{minors[-1][1] + 1}"


@pytest.mark.parametrize(("flavour", "fbgemm"), [("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")])
def test_the_documented_commands_install_a_trio_that_fits(flavour, fbgemm):
    wanted = re.findall(r"([\w-]+)==([\w.+]+)", " ".join(install_commands(flavour)))
    versions = dict(wanted)
    assert list(versions) == ["torch", fbgemm, "torchrec"]
    chosen = Installed(
        torch=versions["torch"],
        fbgemm_gpu=versions.get("fbgemm-gpu"),
        fbgemm_gpu_cpu=versions.get("fbgemm-gpu-cpu"),
        torchrec=versions["torchrec"],
    )
    assert find_problem(chosen, device=flavour) is None
