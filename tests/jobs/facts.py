"""Facts of a small job, and a checkpoint of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from bagpipe.checkpoint.manifest import FileEntry, Manifest, Part
from bagpipe.jobs.job_facts import JobFacts
from bagpipe.types.batch_identity import BatchIdentity, FileIdentity
from bagpipe.types.schema import RowSchema, RowTable

__all__ = ["FACTS", "IDENTITY", "ROWS", "SETTINGS", "identity_with", "trained"]

ROWS = RowSchema(tables=(RowTable(name="goods", dim=4),), optimizer="adagrad")
SETTINGS = {"data.batch_size": 1024, "optim.dense": "adagrad", "run.dtype": "float32", "run.threads": 1}
FILE = FileIdentity(name="/data/day", num_bytes=100, sampled=("a",))
IDENTITY = BatchIdentity(code="c", layout="lines", files=(FILE,))
FACTS = JobFacts(settings=SETTINGS, defaults=SETTINGS, rows=ROWS, identity=IDENTITY, world_size=1)


def identity_with(**changes: Any) -> BatchIdentity:
    """The identity of data whose only file has changed."""
    return dataclasses.replace(IDENTITY, files=(dataclasses.replace(FILE, **changes),))


def trained(*arithmetic: dict[str, str]) -> Manifest:
    """A checkpoint of one rank after the first batch."""
    dense = FileEntry(name="dense-0000.safetensors", num_bytes=1, xxh3_128="0" * 32)
    return Manifest(
        lineage="0" * 32,
        generation=1,
        step=8,
        parent_checkpoint_id="",
        token="1",
        epoch=1,
        world_size=1,
        settings=FACTS.settings,
        row_schema=FACTS.row_schema,
        identity=IDENTITY.to_json(),
        arithmetic=arithmetic,
        parts=(Part(rank=0, dense=dense),),
    )
