"""Files of jobs: ``version = 1``, and a table ``[[jobs]]`` with the fields of `TrainingJob` for each.

backward_s and gradient_bytes are a list by stages, or one number for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError
from bagpipe.jigsaw.job import TrainingJob
from bagpipe.util.documents import read_value, versioned_toml

__all__ = ["jobs_of_toml"]

_VERSION = 1
#: Fields of one number or of a list by stages.
_BY_STAGES = ("backward_s", "gradient_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobFile:
    """Content of a file, without its version."""

    jobs: tuple[TrainingJob, ...] = ()


def jobs_of_toml(text: str, *, source: str) -> tuple[TrainingJob, ...]:
    """The jobs that a text holds, in its order.

    Args:
        text: of the file.
        source: its name, for errors.

    Raises:
        InputError: one line: what was expected and what came.
    """
    document = versioned_toml(text, version=_VERSION, source=source)
    jobs = document.get("jobs")
    if isinstance(jobs, list):
        document["jobs"] = [_with_lists(job) for job in jobs]
    file: _JobFile = read_value(_JobFile, document, source, has_defaults=True, takes_integers=True)
    if not file.jobs:
        raise InputError(f"{source}: jobs: expected at least one [[jobs]], got none")
    return file.jobs


def _with_lists(job: Any) -> Any:
    """A job with lists where the file has one number for all layers."""
    if not isinstance(job, dict):
        return job
    return {key: [value] if key in _BY_STAGES and not isinstance(value, list) else value for key, value in job.items()}
