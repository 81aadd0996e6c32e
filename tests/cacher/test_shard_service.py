"""What a daemon as a shard accepts."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import PROTOCOL_VERSION, settings_of
from bagpipe.client.link import Credentials
from bagpipe.config.sections import Config
from bagpipe.errors import InputError, JobError
from cacher.security import Access
from cacher.shard_link import IndexCall
from tests.cacher.daemons import config, planned_batches, served
from tests.cacher.sharding import assert_same_ranks, batches_of, data_of, sharded

pytestmark = pytest.mark.multiproc


def test_two_daemons_as_shards_by_the_word_of_the_configuration(listen: str, tmp_path: Path) -> None:
    job = config(limit=400, batch_size=40, assign="locality", rows=30_000)
    with ExitStack() as stack:
        one = stack.enter_context(served(job, f"unix:{tmp_path}/one.sock"))
        other = stack.enter_context(served(job, f"unix:{tmp_path}/other.sock"))
        ours = sharded(job, str(one.address), str(other.address), tables=("C1+C2", "C26"))
        data = stack.enter_context(data_of(ours))
        assert_same_ranks(batches_of(data, ours, 3), planned_batches(job, 3))
        assert_same_ranks(batches_of(data, ours, 2, first_batch=3), planned_batches(job, 2, first_batch=3))
        assert data.shards is not None
        assert [totals.losses for totals in data.shards.totals] == [0, 0]


def test_shards_of_other_settings_and_secrets_are_refused(tmp_path: Path) -> None:
    job = config()
    with served(job, "127.0.0.1:0", access=Access(secret="a secret of many letters")) as shard:
        with pytest.raises(InputError, match=rf"shard 0 \({shard.address}\).*the shared secret is missing"):
            refused(sharded(job, str(shard.address)))
    with served(job, f"unix:{tmp_path}/one.sock") as shard:
        other = dataclasses.replace(job, run=dataclasses.replace(job.run, seed=6))
        with pytest.raises(InputError, match=r"shard 0 .*: run.seed: the shard has 5, the cacher 6"):
            refused(sharded(other, str(shard.address)))


def refused(job: Config) -> None:
    with data_of(job):
        pass


HELLO = {"hello": pb.IndexHello(protocol=PROTOCOL_VERSION, settings="{}")}


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([{"ack": pb.IndexAck(watermark=1)}], "expected Hello, got ack"),
        (
            [{"hello": pb.IndexHello(protocol=3)}],
            f"protocol version: the cacher speaks {PROTOCOL_VERSION}, the trainer 3",
        ),
        ([HELLO], r"data.path: the shard has '', the cacher nothing"),
        ([{}, {"ack": pb.IndexAck(watermark=1)}], "expected IndexStart, got ack"),
        ([{}, {"start": pb.IndexStart(phase="train", spec="[]")}], "oracle spec: expected a JSON object"),
        ([{}, {"start": pb.IndexStart(phase="train", spec="{}")}], "world size: expected 1 to 1024, got None"),
        ([{}, {"start": pb.IndexStart(phase="train", spec='{"world_size": 1}')}], "credits: expected 1 to 1024, got 0"),
    ],
)
def test_requests_that_make_no_sense_are_refused(requests: list[dict[str, Any]], message: str, listen: str) -> None:
    """An empty request stands for a Hello that is welcome."""
    job = config()
    welcome = {"hello": pb.IndexHello(protocol=PROTOCOL_VERSION, settings=json.dumps(settings_of(job)))}
    with served(job, listen), IndexCall(parse_address(listen), Credentials()) as call:
        for request in requests:
            call.put(**(request or welcome))
        with pytest.raises(JobError, match=message):
            raise_first_error(call)


def raise_first_error(call: IndexCall) -> None:
    for reply in call.messages():
        if reply.WhichOneof("kind") == "error":
            raise JobError(reply.error.message)
