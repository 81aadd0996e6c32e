"""Runs of a job: at BASE, at HEAD, and at HEAD from what it left at BASE.

folder/JOB/source/checkpoints ─start_from─┐
folder/JOB/whole/                         ├─> Outcome of the whole run: result, commands, defect
folder/JOB/half/checkpoints ──copied──> HEAD: resumed, compared with BASE's whole run
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

from bagpipe.errors import EXIT_DONE, EXIT_FAILED, InputError
from bagpipe.util.outputs import write_json
from tests.harness.fuzz.log_files import write_log
from tests.harness.fuzz.site import Site
from tests.harness.fuzz.twin import Outcome, TwinRun
from tests.harness.same_bits.plan import LOGS, Job
from tests.system.clicks import SCHEMAS, write_clicks, write_schemas

__all__ = ["Known", "commit_of", "run_from", "run_job", "worktree", "write_data"]

#: How the names of the packages begin that decide bits.
_PACKAGES = ("torch", "fbgemm", "numpy", "pyarrow")
#: Written last, so that a folder with this file is whole.
_OUTCOME = "outcome.json"


def commit_of(name: str) -> str:
    """The commit's full hash. InputError: git does not know it."""
    return _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", of=name)


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """A checkout of the commit in a new folder, which is removed at the end."""
    _git("worktree", "add", "--quiet", "--detach", str(folder), commit, of=commit)
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder), of=commit)


def _git(*words: str, of: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().replace("\n", "; ") or "git does not know it"
        raise InputError(f"--base: expected a commit of this repository, got {of!r}: {said}")
    return done.stdout.strip()


def write_data(names: Sequence[str], folder: Path) -> dict[str, dict[str, str]]:
    """Write data of the plan. Returns the values of ``data.*`` keys, by name."""
    clicks, schemas = write_clicks(folder / "clicks.parquet"), write_schemas(folder)
    found = {}
    for name in dict.fromkeys(names):
        if name in SCHEMAS:
            found[name] = {"data.path": str(clicks), "data.schema": str(schemas[name])}
        else:
            (folder / name).mkdir()
            found[name] = write_log(LOGS[name], folder / name)
    return found


def run_job(job: Job, site: Site, data: Mapping[str, str], folder: Path, *, half: bool = False) -> Outcome:
    """The whole job, and the run before it that it starts from.

    Args:
        job: what is run.
        site: the checkout.
        data: values of the data's keys.
        folder: of this job's files at this checkout; has the job's name.
        half: also leave the checkpoints of half of the run.

    Returns:
        End of the whole run; of a run before it, if that has failed.
    """
    if job.source:
        source = _run(job, site, data, folder, "source", job.source)
        if source.problem or source.code != EXIT_DONE:
            return source
    whole = _run(job, site, data, folder, "whole", _start_from(job, folder))
    if half and job.half:
        stopped = _run(job, site, data, folder, "half", f"run.steps={job.half}")
        if not whole.problem and (stopped.problem or stopped.code != EXIT_DONE):
            return stopped
    return whole


def run_from(job: Job, site: Site, data: Mapping[str, str], base: Path, folder: Path) -> Outcome | None:
    """The job from what `run_job` left in the folder `base`; None: it left nothing that the job could begin with."""
    if job.source:
        return _run(job, site, data, folder, "started", _start_from(job, base))
    if not job.half:
        return None
    shutil.copytree(base / "half" / "checkpoints", folder / "half" / "checkpoints")
    return _run(job, site, data, folder, "half")


def _start_from(job: Job, folder: Path) -> str:
    return f"checkpoint.start_from={folder}/source/checkpoints" if job.source else ""


def _run(job: Job, site: Site, data: Mapping[str, str], folder: Path, name: str, more: str = "") -> Outcome:
    """One run in a folder of its own. Its end has a problem if a kill did not happen."""
    kills = job.kills if name == "whole" else ()
    draw = job.draw(name, more, kills=kills)
    (folder / name).mkdir(parents=True, exist_ok=True)
    run = TwinRun(draw=draw, twin=draw.twins[0], site=site, folder=folder / name, data=data, cache_rows=job.cache_rows)
    outcome = run.go()
    if not outcome.problem and outcome.code == EXIT_DONE and outcome.num_kills != len(kills):
        return dataclasses.replace(outcome, problem=f"{outcome.num_kills} of {len(kills)} kills happened")
    return outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Ends of jobs at a commit, with what the jobs left there, kept between calls of the command.

    Args:
        folder: of the commit; made where missing.
    """

    folder: Path

    def place(self, job: Job, data: Mapping[str, str]) -> Path:
        """The folder of the job, of its data and of this machine's packages and processor."""
        parts = [repr(job), repr(job.draw("whole").job), *_machine(), _digest(data)]
        return self.folder / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20] / job.name

    def get(self, place: Path) -> Outcome | None:
        """The end of a job; None: it is not known."""
        if not (place / _OUTCOME).exists():
            return None
        fields = json.loads((place / _OUTCOME).read_text())
        return Outcome(**{**fields, "lines": tuple(fields["lines"]), "commands": tuple(fields["commands"])})

    def put(self, place: Path, outcome: Outcome, folder: Path) -> None:
        """Keep the end of a job, unless it is a failure, and the files in its folder."""
        if outcome.problem or outcome.code == EXIT_FAILED:
            return
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        write_json(str(place / _OUTCOME), dataclasses.asdict(outcome))


def _machine() -> list[str]:
    """What decides bits beside the job and the code."""
    packages = {each.name: each.version for each in distributions() if each.name.startswith(_PACKAGES)}
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return [platform.python_version(), *processor[:1], *(f"{name} {packages[name]}" for name in sorted(packages))]


def _digest(data: Mapping[str, str]) -> str:
    """Of all files that the values name."""
    found = hashlib.sha256()
    for key, path in sorted(data.items()):
        found.update(key.encode())
        files = sorted(Path(path).rglob("*")) if Path(path).is_dir() else [Path(path)]
        for file in files:
            if file.is_file():
                found.update(os.fsencode(file.name) + file.read_bytes())
    return found.hexdigest()
