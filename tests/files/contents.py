"""Contents of remote objects for the tests of this folder."""

from __future__ import annotations

import random

import fsspec

from bagpipe.files import remote

__all__ = ["CONTENT", "memory"]

CONTENT = random.Random(0).randbytes(1_500_000)


def memory(name: str, content: bytes) -> str:
    """The URL of an object in this process's memory, whose version nothing has looked at."""
    fsspec.filesystem("memory").pipe_file(f"/{name}", content)
    remote.forget("memory://")
    return f"memory://{name}"
