"""A daemon with ten thousand idle connections continues to serve, and its memory is bounded."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack

import pytest

from tests.cacher.daemons import Daemon, all_batches, assert_same_batches, config, planned_batches

NUM_CONNECTIONS = 10_000
#: 24 KiB of the daemon and gRPC for each.
MAX_GROWTH_BYTES = NUM_CONNECTIONS * (24 << 10)

pytestmark = [
    pytest.mark.alone,
    pytest.mark.multiproc,
    pytest.mark.skipif(
        resource.getrlimit(resource.RLIMIT_NOFILE)[1] < NUM_CONNECTIONS + 1000, reason="too few file descriptors"
    ),
]


def test_ten_thousand_connections_block_no_trainer() -> None:
    job = config(limit=200)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the daemon inherits it
    try:
        with Daemon(job, "127.0.0.1:0", "--hello-timeout-s", "120") as daemon, ExitStack() as stack:
            host, _, port = daemon.url.rpartition(":")
            [expected] = planned_batches(job)
            assert_same_batches(all_batches(daemon.url, job, job_id="before")[0], expected)
            before_bytes = daemon.rss_bytes()
            for _ in range(NUM_CONNECTIONS):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            assert_same_batches(all_batches(daemon.url, job, job_id="amid")[0], expected)
            assert daemon.rss_bytes() < before_bytes + MAX_GROWTH_BYTES
            stack.close()
            assert_same_batches(all_batches(daemon.url, job, job_id="after")[0], expected)
            assert not [line for line in daemon.logs if "traceback" in line]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
