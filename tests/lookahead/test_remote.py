"""`RemotePlanner` over real daemons: its plans, its errors, and what a daemon that is gone leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagpipe.client.access import Cacher
from bagpipe.errors import InputError, JobError
from bagpipe.lookahead.remote import RemotePlanner
from tests.cacher.certificates import make_certificates
from tests.cacher.daemons import Daemon, config, served
from tests.lookahead.plan_daemons import plan_daemon
from tests.lookahead.streams import batches_of, expected_parts, plain_part, spec_of
from tests.pipeline.small_loop import until

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the tests that do not end it."""
    with plan_daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
        assert not [line for line in daemon.logs if "traceback" in line or "time" not in line]


def test_several_planners_at_once(daemon: Daemon) -> None:
    met = threading.Barrier(3, timeout=30)

    def plan(number: int) -> None:
        spec, batches = spec_of(num_slots=20 + number, lookahead=1 + number), batches_of(30, size=4 + number)
        with RemotePlanner(spec, Cacher(daemon.url)) as planner:
            met.wait()
            assert [plain_part(part) for part in planner.run(batches)] == expected_parts(batches, spec)
            met.wait()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(plan, range(3)))


def test_a_killed_daemon_is_one_clear_error_and_the_next_run_finds_another(tmp_path: Path) -> None:
    with plan_daemon(tmp_path) as daemon, RemotePlanner(spec_of(), Cacher(daemon.url, timeout_s=20)) as planner:
        run = planner.run(batches_of(50))
        next(run)
        daemon.kill()
        with pytest.raises(JobError) as raised:
            list(run)
        text = str(raised.value)
        assert text.startswith(f"the cacher at {daemon.url}, which plans for this job, is gone (")
        assert text.endswith("): start it again, and resume the job from its checkpoint")
        with plan_daemon(tmp_path):
            found = [plain_part(part) for part in planner.run(batches_of(9))]
        assert found == expected_parts(batches_of(9), spec_of())


def test_a_daemon_that_never_comes(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised, RemotePlanner(spec_of(), Cacher(f"unix:{tmp_path}/no", timeout_s=0.2)):
        pass
    assert str(raised.value).startswith(f"the cacher at unix:{tmp_path}/no was not reached within 0.2 s: ")
    assert "\n" not in str(raised.value)


def test_a_daemon_that_comes_late(tmp_path: Path) -> None:
    """A planner waits for a daemon that is being started."""
    with ThreadPoolExecutor(1) as pool:
        planner = RemotePlanner(spec_of(), Cacher(f"unix:{tmp_path}/c.sock", timeout_s=60))
        opened = pool.submit(planner.open)
        with plan_daemon(tmp_path):
            opened.result()
            assert len(list(planner.run(batches_of(5)))) == 5
            planner.close()


def test_a_daemon_with_a_secret(tmp_path: Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("a secret of some length\n")
    wrong.write_text("another secret of some length")
    for file in (secret, wrong):
        file.chmod(0o600)
    with plan_daemon(tmp_path, "--secret-file", str(secret)) as daemon:
        with RemotePlanner(spec_of(), Cacher(daemon.url, secret_file=str(secret))) as planner:
            assert len(list(planner.run(batches_of(5)))) == 5
        for access in (Cacher(daemon.url), Cacher(daemon.url, secret_file=str(wrong))):
            with pytest.raises(InputError, match="refused us: the shared secret is missing or wrong"):
                RemotePlanner(spec_of(), access).open()
    with pytest.raises(InputError, match=r"^cacher\.secret_file /no/such: No such file or directory$"):
        RemotePlanner(spec_of(), Cacher(daemon.url, secret_file="/no/such")).open()


def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    with served(config(), "127.0.0.1:0", access=certificates.access) as server:
        url, authority = str(server.address), certificates.path("ca")
        assert url.startswith("grpcs://")
        pair = {"tls_cert": certificates.path("trainer"), "tls_key": certificates.path("trainer-key")}
        with RemotePlanner(spec_of(), Cacher(url, tls_ca=authority, **pair, timeout_s=20)) as planner:
            assert len(list(planner.run(batches_of(5)))) == 5
        stranger = {"tls_cert": certificates.path("stranger"), "tls_key": certificates.path("stranger-key")}
        for files in ({}, stranger):
            with pytest.raises(InputError, match=r"was not reached within 0\.5 s"):
                RemotePlanner(spec_of(), Cacher(url, tls_ca=authority, **files, timeout_s=0.5)).open()
        with pytest.raises(InputError, match=r"^cacher\.tls_cert and cacher\.tls_key go together$"):
            RemotePlanner(spec_of(), Cacher(url, tls_cert=pair["tls_cert"])).open()


def test_it_leaves_no_descriptor_open(daemon: Daemon) -> None:
    def connect() -> None:
        with RemotePlanner(spec_of(), Cacher(daemon.url)) as planner:
            list(planner.run(batches_of(5)))

    connect()  # gRPC keeps what its first channel opens
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        connect()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)  # gRPC closes sockets on threads of its own
