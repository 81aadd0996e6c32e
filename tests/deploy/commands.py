"""Checks command lines of the files in deploy/ with the parsers of the programs that they start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bagpipe.config.load import Option, parse_config
from bagpipe.config.sections import Config
from bagpipe.util.programs import COMMANDS
from cacher import cli as cacher_cli

DEPLOY = Path(__file__).parents[2] / "deploy"

#: Options of each program besides the configuration's.
_OPTIONS = {"cacher": cacher_cli._OPTIONS, "train": (Option(flag="--result", help=""),)}


def manifests() -> list[dict[str, Any]]:
    """All Kubernetes objects."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")))
    return [item for text in texts for item in yaml.safe_load_all(text)]


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = (item for item in manifests() if (item["kind"], item["metadata"]["name"]) == (kind, name))
    return found


def job_file(folder: Path) -> Path:
    """The job.toml of the manifests, in a folder of the test's."""
    path = folder / "job.toml"
    path.write_text(manifest("ConfigMap", "bagpipe-job")["data"]["job.toml"], encoding="utf-8")
    return path


def check(argv: Sequence[str], job: Path) -> Config:
    """Parse a command line as its programs do, with a configuration file in place of the one that it names.

    Raises:
        InputError: a flag or a value that the program refuses.
        SystemExit: one that torchrun refuses.
    """
    program, *words = argv
    if Path(program).name == "torchrun":
        from torch.distributed.run import get_args_parser

        names = get_args_parser().parse_args(words)
        assert (names.module, names.training_script) == (True, "bagpipe.train")
        return check(["bagpipe", "train", *names.training_script_args], job)
    assert Path(program).name == "bagpipe", program
    command, *flags = words
    assert command in COMMANDS
    (place,) = (number for number, flag in enumerate(flags) if flag.partition("=")[0] == "--config")
    flags[place : place + (1 if "=" in flags[place] else 2)] = ["--config", str(job)]
    return parse_config(flags, command, _OPTIONS[command]).config
