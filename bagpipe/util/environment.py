"""Checks that the installed torch, fbgemm and torchrec are compatible and can be imported, before any of them is.

    importlib.metadata ──Installed──> find_problem ──one line: installed, required, the command──> InputError

Every fbgemm minor release is compiled against exactly one torch minor release, but the wheels' metadata does not say
so: pip installs pairs that fail at ``import torchrec`` with an undefined symbol. This module reads versions only and
needs only the standard library, so the set-up script uses its table too.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.errors import InputError
from bagpipe.util.packages import distribution_of, explain_missing, missing_line
from bagpipe.util.temporary_folder import temporary_place

__all__ = [
    "RECOMMENDED",
    "TRIOS",
    "Installed",
    "Trio",
    "check_environment",
    "check_import",
    "explain_import",
    "find_problem",
    "install_commands",
    "read_installed",
]

Version = tuple[int, int]  # major and minor release


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """Releases of torch, fbgemm and torchrec that load together.

    Attributes:
        torch: the release to install; every patch release of its minor is compatible.
        fbgemm: the release of ``fbgemm-gpu`` (CUDA) or ``fbgemm-gpu-cpu`` to install; every patch of its minor is
            compatible.
        torchrec: the release to install.
        torchrec_minors: oldest and newest torchrec minor release that load with this pair.
    """

    torch: str
    fbgemm: str
    torchrec: str
    torchrec_minors: tuple[Version, Version]


#: Oldest first. Source: every pair of torch 2.11-2.14 with fbgemm-gpu-cpu 1.4-1.9 imported and run on Linux x86-64.
TRIOS: tuple[Trio, ...] = (
    # torchrec 1.7 and later import fbgemm_gpu.tbe.monitoring, which fbgemm 1.6 lacks.
    Trio(torch="2.11.0", fbgemm="1.6.0", torchrec="1.6.1", torchrec_minors=((1, 6), (1, 6))),
    Trio(torch="2.12.1", fbgemm="1.7.0", torchrec="1.9.2", torchrec_minors=((1, 6), (1, 9))),
    Trio(torch="2.13.0", fbgemm="1.8.0", torchrec="1.9.2", torchrec_minors=((1, 6), (1, 9))),
    Trio(torch="2.14.1", fbgemm="1.9.0", torchrec="1.9.2", torchrec_minors=((1, 6), (1, 9))),
)

#: The trio that the set-up installs: the newest one tested with the whole suite.
RECOMMENDED = TRIOS[2]

FBGEMM_NAMES = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Installed versions as the packages' metadata gives them; None: not installed."""

    torch: str | None
    fbgemm_gpu: str | None
    fbgemm_gpu_cpu: str | None
    torchrec: str | None


def read_installed() -> Installed:
    """The versions installed for this interpreter. Imports none of the packages."""
    return Installed(
        torch=_version_of("torch"),
        fbgemm_gpu=_version_of("fbgemm-gpu"),
        fbgemm_gpu_cpu=_version_of("fbgemm-gpu-cpu"),
        torchrec=_version_of("torchrec"),
    )


def check_environment(device: str = "cpu") -> None:
    """Check what torch and torchrec need before they are imported. Programs that use them call it first.

    Args:
        device: `run.device`; ``cuda`` requires CUDA builds.

    Raises:
        InputError: the installed packages are incompatible, and the line holds the command that fixes it; or there is
            no folder for temporary files, which torch looks up while it is imported.
    """
    temporary_place()
    problem = find_problem(read_installed(), device=device)
    if problem is not None:  # the command must change this environment, whichever shell runs it
        raise InputError(problem.replace("python -m pip", f"{shlex.quote(sys.executable)} -m pip"))


def check_import(error: ImportError | OSError) -> None:
    """Say why an import by this library failed, if that is because of the installed packages.

    Raises:
        InputError: incompatible packages, or one is missing; the line holds the command that fixes it.
    """
    check_environment()
    name = getattr(error, "name", None) or ""
    if isinstance(error, ModuleNotFoundError) and name.partition(".")[0] not in ("", "bagpipe"):
        raise InputError(
            f"{missing_line([distribution_of(name)])} "
            "(the extra `train` of bagpipe-recsys names all that TrainPipeline needs)"
        ) from error


def explain_import(error: BaseException) -> None:
    """Say which package a program lacks, if that is why it fails.

    Raises:
        InputError: a package of the trio, or one of `bagpipe.util.packages`, is missing; the line holds the command
            that fixes it.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return
    if error.name.partition(".")[0] in ("torch", "torchrec", "fbgemm_gpu"):
        check_environment()
    explain_missing(error.name)


def find_problem(installed: Installed, device: str = "cpu") -> str | None:
    """The problem of a set of installed versions, in one line with the command that fixes it, or None. Pure."""
    flavour = "cuda" if device.startswith("cuda") else "cpu"
    if installed.torch is None:
        return f"torch is not installed; fix: {_pip_commands(RECOMMENDED, flavour, torch=True)}"
    trio = _trio_of(installed.torch)
    if trio is None:
        known = ", ".join(_minor_text(trio.torch) for trio in TRIOS)
        return (
            f"torch {installed.torch} is installed, but fbgemm is built for torch {known} only; "
            f"fix: {_pip_commands(RECOMMENDED, flavour, torch=True)}"
        )
    if flavour == "cuda" and "+cpu" in installed.torch:
        return (
            f"device {device} needs a CUDA build of torch, but torch {installed.torch} is a CPU build; "
            f"fix: {_pip_commands(trio, flavour, torch=True, remove=('torch', 'fbgemm-gpu-cpu'))}"
        )
    return _fbgemm_problem(installed, trio, flavour) or _torchrec_problem(installed, trio)


def install_commands(flavour: str) -> tuple[str, ...]:
    """The documented commands that install the recommended trio, in order.

    Args:
        flavour: ``cpu`` or ``cuda``.
    """
    commands = _pip_commands(RECOMMENDED, flavour, torch=True).split(" && ")
    return tuple(command.removeprefix("python -m ") for command in commands)


def _fbgemm_problem(installed: Installed, trio: Trio, flavour: str) -> str | None:
    have = {
        name: version
        for name, version in (("fbgemm-gpu-cpu", installed.fbgemm_gpu_cpu), ("fbgemm-gpu", installed.fbgemm_gpu))
        if version is not None
    }
    listed = " and ".join(f"{name} {version}" for name, version in have.items()) or "no fbgemm"
    wanted = f"torch {installed.torch} fits fbgemm {_minor_text(trio.fbgemm)} only"
    if len(have) == 2:  # they overwrite each other's files
        fix = _pip_commands(trio, flavour, remove=tuple(have))
        return f"{listed} are both installed, and both provide fbgemm_gpu; fix: {fix}"
    if flavour == "cuda" and "fbgemm-gpu-cpu" in have:
        fix = _pip_commands(trio, flavour, remove=("fbgemm-gpu-cpu",))
        return f"a cuda device needs fbgemm-gpu, but {listed} is installed; fix: {fix}"
    if not have or _minor(next(iter(have.values()))) != _minor(trio.fbgemm):
        if have:  # replace the flavour that is there
            flavour = "cpu" if "fbgemm-gpu-cpu" in have else "cuda"
        return f"{listed} is installed, but {wanted}; fix: {_pip_commands(trio, flavour)}"
    return None


def _torchrec_problem(installed: Installed, trio: Trio) -> str | None:
    oldest, newest = trio.torchrec_minors
    if installed.torchrec is not None and oldest <= _minor(installed.torchrec) <= newest:
        return None
    listed = f"torchrec {installed.torchrec}" if installed.torchrec is not None else "no torchrec"
    span = _minor_text(trio.torchrec) if oldest == newest else f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    return (
        f"{listed} is installed, but torch {installed.torch} with fbgemm {_minor_text(trio.fbgemm)} fits torchrec "
        f"{span}; fix: python -m pip install --no-deps torchrec=={trio.torchrec}"
    )


def _pip_commands(trio: Trio, flavour: str, *, torch: bool = False, remove: Sequence[str] = ()) -> str:
    """The shell line that removes packages and installs `trio` (torch only on request)."""
    parts = [f"python -m pip uninstall -y {' '.join(remove)}"] if remove else []
    if torch and flavour == "cpu":
        # One index in place of the usual one: with two, either could answer for the name of a dependency.
        parts.append(f"python -m pip install torch=={trio.torch}+cpu --index-url https://download.pytorch.org/whl/cpu")
    elif torch:
        parts.append(f"python -m pip install torch=={trio.torch}")
    parts.append(f"python -m pip install {FBGEMM_NAMES[flavour]}=={trio.fbgemm}")
    parts.append(f"python -m pip install --no-deps torchrec=={trio.torchrec}")
    return " && ".join(parts)


def _trio_of(torch_version: str) -> Trio | None:
    for trio in TRIOS:
        if _minor(trio.torch) == _minor(torch_version):
            return trio
    return None


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> Version:
    """``2.13.0+cpu`` -> (2, 13); an unparsable version -> (0, 0), which matches nothing."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def _minor_text(version: str) -> str:
    major, minor = _minor(version)
    return f"{major}.{minor}"
