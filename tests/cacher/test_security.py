"""Access control of the cacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bagpipe.client.access import Cacher
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import job_label
from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.lookahead.remote import RemotePlanner
from cacher.security import Access, check_access
from tests.cacher.certificates import Certificates, make_certificates
from tests.cacher.daemons import (
    all_batches,
    assert_same_batches,
    config,
    planned_batches,
    refused_daemon,
    remote,
    served,
    spec_of,
)
from tests.lookahead import streams

SECRET = "a secret of some length"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text(SECRET + "\n")
    (tmp_path / "secret").chmod(0o600)
    return str(tmp_path / "secret")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:7000", "node-1:7000"])
def test_a_network_listener_must_be_protected(listen: str) -> None:
    address = parse_address(listen)
    for access in (Access(), Access(tls_cert="c", tls_key="k")):
        with pytest.raises(
            InputError, match=r"can be reached from other machines: give --secret-file \(or BAGPIPE_CACHER_SECRET "
        ):
            check_access(address, access)
    check_access(address, Access(secret="s"))
    check_access(address, Access(tls_cert="c", tls_key="k", tls_client_ca="ca"))


@pytest.mark.parametrize("listen", ["unix:/run/c.sock", "127.0.0.1:0", "[::1]:0", "localhost:7000"])
def test_a_local_listener_needs_no_protection(listen: str) -> None:
    check_access(parse_address(listen), Access())


@pytest.mark.parametrize(
    ("listen", "access", "message"),
    [
        ("127.0.0.1:0", Access(tls_cert="c"), "--tls-cert and --tls-key go together"),
        ("127.0.0.1:0", Access(tls_client_ca="c"), "--tls-client-ca needs --tls-cert and --tls-key"),
        ("unix:/c.sock", Access(tls_cert="c", tls_key="k"), "a unix socket needs no TLS"),
        ("grpcs://127.0.0.1:0", Access(), "needs --tls-cert and --tls-key"),
    ],
)
def test_incomplete_protection_is_refused(listen: str, access: Access, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_access(parse_address(listen), access)


def test_the_secret_grants_access(secret_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = config()
    with served(job, "127.0.0.1:0", access=Access(secret=SECRET)) as server:
        url = str(server.address)
        assert_same_batches(all_batches(url, job, secret=SECRET)[0], planned_batches(job)[0])
        with_file = dataclasses.replace(job, cacher=dataclasses.replace(job.cacher, secret_file=secret_file))
        assert len(all_batches(url, with_file)[0]) == 18
        with monkeypatch.context() as changed:
            changed.setenv("BAGPIPE_CACHER_SECRET", SECRET)
            assert len(all_batches(url, job)[0]) == 18
        for wrong in ("", SECRET[:-1], SECRET + "x", SECRET.upper()):
            with pytest.raises(InputError, match="refused us: the shared secret is missing or wrong"):
                all_batches(url, job, secret=wrong)
        assert server.counters.totals().refused == 4
        assert server.jobs.counts() == (0, 0)


def test_only_health_probes_need_no_secret() -> None:
    with served(config(), "127.0.0.1:0", access=Access(secret=SECRET)) as server:
        with grpc.insecure_channel(server.address.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="bagpipe.v1.Cacher")
            assert stub.Check(request, timeout=250).status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as raised:
                next(stub.Watch(request, timeout=250))
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_tls_with_certificates_on_both_sides(certificates: Certificates) -> None:
    job = config()
    with served(job, "127.0.0.1:0", access=certificates.access) as server:
        url = str(server.address)
        assert url.startswith("grpcs://")
        known = dataclasses.replace(job, cacher=certificates.trainer(timeout_s=20))
        assert_same_batches(all_batches(url, known)[0], planned_batches(job)[0])
        for name in ("", "stranger"):
            unknown = dataclasses.replace(job, cacher=certificates.trainer(name))
            with pytest.raises(InputError, match="was not reached within 1 s"):
                all_batches(url, unknown)
        with pytest.raises(InputError, match="was not reached within 1 s"):  # no TLS
            all_batches(server.address.target, dataclasses.replace(job, cacher=certificates.trainer()))


def test_a_job_is_that_of_the_certificate_of_its_first_rank(certificates: Certificates) -> None:
    """A renewed certificate has the same names."""

    def job_of(name: str) -> Config:
        return dataclasses.replace(config(), cacher=certificates.trainer(name, timeout_s=20))

    said = "belongs to a client with another certificate: expected its names in yours, got neighbour.example"
    with served(config(), "127.0.0.1:0", access=certificates.access) as server:
        url = str(server.address)
        with remote(url, job_of("trainer"), rank=0, world_size=2, job_id="shared") as first:
            for rank in (0, 1):
                with pytest.raises(InputError, match=f"^job {job_label('shared')} {said}$"):
                    remote(url, job_of("neighbour"), rank=rank, world_size=2, job_id="shared").__enter__()
            assert len(all_batches(url, job_of("neighbour"), job_id="own")[0]) == 18
            with remote(url, job_of("renewed"), rank=1, world_size=2, job_id="shared") as second:
                for source in (first, second):
                    assert next(source.batches("train", spec_of(config(), source.schema, 2))).batch.index == 0
        assert len(all_batches(url, job_of("neighbour"), job_id="shared")[0]) == 18, "the job has ended"


def test_planners_of_a_job_are_those_of_one_certificate(certificates: Certificates) -> None:
    def cacher(name: str) -> Cacher:
        cert, key = certificates.path(name), certificates.path(f"{name}-key")
        return Cacher(str(server.address), tls_ca=certificates.path("ca"), tls_cert=cert, tls_key=key)

    with served(config(), "127.0.0.1:0", access=certificates.access) as server:
        with RemotePlanner(streams.spec_of(), cacher("trainer")) as planner:
            plans = planner.run(streams.batches_of(9))
            found = [streams.plain_part(next(plans))]
            with pytest.raises(InputError, match="belongs to a client with another certificate"):
                RemotePlanner(streams.spec_of(), cacher("neighbour")).__enter__()
            with RemotePlanner(streams.spec_of(), cacher("renewed")) as second:
                assert len(list(second.run(streams.batches_of(9)))) == 9
            found += [streams.plain_part(part) for part in plans]
        assert found == streams.expected_parts(streams.batches_of(9), streams.spec_of())


def test_a_cacher_with_a_wrong_certificate(certificates: Certificates) -> None:
    """The cacher's certificate is of another authority: the trainer does not send it the secret."""
    access = Access(tls_cert=certificates.path("stranger"), tls_key=certificates.path("stranger-key"))
    job = dataclasses.replace(config(), cacher=certificates.trainer())
    with served(job, "127.0.0.1:0", access=access) as server:
        with pytest.raises(InputError, match="was not reached within 1 s"):
            all_batches(str(server.address), job, secret=SECRET)


@pytest.mark.multiproc
def test_the_program_refuses_an_open_listener() -> None:
    code, said = refused_daemon("--listen", "0.0.0.0:0")
    assert code == 2
    assert said.startswith("error: --listen 0.0.0.0:0 can be reached from other machines")
    assert said.count("\n") == 1
