"""gRPC's core is silent in every program of ours, unless the user asks for its log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Imports a module up to the import of `grpc`, whose core then reads its verbosity, and prints it.
_PROGRAM = """
import importlib, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"), flush=True)
            os._exit(0)  # no need of the rest

sys.meta_path.insert(0, Finder())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("module", ["bagpipe.client.remote", "cacher.cli", "trainer.open_job"])
@pytest.mark.parametrize("asked", ["", "DEBUG"])
def test_the_verbosity_is_set_before_grpc_is_imported(module: str, asked: str) -> None:
    others = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment = {**others, "GRPC_VERBOSITY": asked} if asked else others
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, module], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [asked or "NONE"]
