"""The Kubernetes manifests: their schemas, and that commands, ports, secrets and settings fit together."""

from __future__ import annotations

import re
import subprocess
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from bagpipe.store.server.embedded import installed_servers
from tests.deploy.commands import check, job_file, manifest, manifests

ROOT = Path(__file__).parents[2]

JOBSET = manifest("JobSet", "bagpipe-train")
RANKS = JOBSET["spec"]["replicatedJobs"][0]
#: What a JobSet makes of its first template.
RANKS_JOB = {"apiVersion": "batch/v1", "kind": "Job", "metadata": JOBSET["metadata"], "spec": RANKS["template"]["spec"]}

PODS = {
    "store": manifest("StatefulSet", "bagpipe-store")["spec"]["template"],
    "cacher": manifest("Deployment", "bagpipe-cacher")["spec"]["template"],
    "trainer": RANKS_JOB["spec"]["template"],
}


@contextmanager
def started(script):
    """The server of a start script, until it answers."""
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert any("eady to accept connections" in line for line in server.stdout)
            yield
        finally:
            server.terminate()


def container(pod: str) -> dict[str, Any]:
    (found,) = PODS[pod]["spec"]["containers"]
    return found


@pytest.mark.parametrize(
    "item", [*manifests(), RANKS_JOB], ids=lambda item: f"{item['kind']} {item['metadata']['name']}"
)
def test_every_object_has_its_schema(item):
    if item["kind"] == "JobSet":  # a custom resource: its job template is among the items
        assert item["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert set(item["spec"]) <= {"failurePolicy", "network", "replicatedJobs", "startupPolicy", "successPolicy"}
        assert set(RANKS) == {"name", "replicas", "template"}
        assert set(RANKS["template"]) == {"spec"}
    else:
        import kubernetes_validate  # its grammars take two seconds, in each process that collects this file

        kubernetes_validate.validate(item, "1.31", strict=True)


def test_the_commands_are_those_of_the_programs(tmp_path):
    job = job_file(tmp_path)
    config = check(["bagpipe", *container("cacher")["args"]], job)
    trainer = container("trainer")
    assert check([*trainer["command"], *trainer["args"]], job) == config
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in trainer["args"] if "=" in flag)
    assert int(flags["nnodes"]) == RANKS_JOB["spec"]["parallelism"] == RANKS_JOB["spec"]["completions"]
    name = JOBSET["metadata"]["name"]
    assert flags["rdzv-endpoint"].startswith(f"{name}-{RANKS['name']}-0-0.{name}:")


def test_addresses_ports_and_files_fit_together(tmp_path):
    config = check(["bagpipe", *container("cacher")["args"]], job_file(tmp_path))
    cacher = dict(flag.removeprefix("--").split("=", 1) for flag in container("cacher")["args"] if "=" in flag)
    ports = {pod: {item["name"]: item["containerPort"] for item in container(pod)["ports"]} for pod in PODS}
    assert config.cacher.url == f"bagpipe-cacher:{ports['cacher']['grpc']}"
    assert cacher["listen"] == f"0.0.0.0:{ports['cacher']['grpc']}"
    assert cacher["metrics"] == f"0.0.0.0:{ports['cacher']['metrics']}"
    assert config.run.metrics == f"0.0.0.0:{ports['trainer']['metrics']}"
    assert config.store.url == f"redis://trainer@bagpipe-store:{ports['store']['redis']}"
    for pod in ("store", "cacher"):
        service, template = manifest("Service", f"bagpipe-{pod}"), PODS[pod]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert {item["port"] for item in service["spec"]["ports"]} <= set(ports[pod].values())
    assert PODS["cacher"]["spec"]["terminationGracePeriodSeconds"] > float(cacher["drain-timeout-s"])
    mounts = {pod: {item["mountPath"] for item in container(pod)["volumeMounts"]} for pod in PODS}
    assert config.data.path.startswith("/data")
    assert "/data" in mounts["cacher"]
    assert config.checkpoint.dir.startswith("/checkpoints")
    assert "/checkpoints" in mounts["trainer"]
    for file in (config.cacher.secret_file, config.store.password_file, cacher["secret-file"]):
        assert Path(file).parent == Path("/run/secrets/bagpipe")
    for pod in PODS.values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert not volumes["secrets"]["secret"]["defaultMode"] & 0o007  # others may not read: the programs refuse it


def test_probes_ask_pages_that_exist():
    pages = {"cacher": {"/healthz", "/readyz"}, "trainer": {"/healthz"}}
    for pod, paths in pages.items():
        probes = [container(pod)[name] for name in container(pod) if name.endswith("Probe")]
        assert {probe["httpGet"]["path"].partition("?")[0] for probe in probes} == paths
        assert {probe["httpGet"]["port"] for probe in probes} == {"metrics"}


@pytest.mark.redis
@pytest.mark.parametrize("binary", list(installed_servers()), ids=lambda path: path.name)
def test_the_store_starts_as_its_script_says(binary, tmp_path):
    """With the rights of docs/store.md, no other user, and the durability that the job asks for.

    Rows survive a restart.
    """
    scripts = manifest("ConfigMap", "bagpipe-store")["data"]
    job = tomllib.loads(manifest("ConfigMap", "bagpipe-job")["data"]["job.toml"])
    rights = re.search(r"~bagpipe:meta (.*\+select)$", (ROOT / "docs" / "store.md").read_text(), re.MULTILINE)
    assert rights is not None
    name = job["store"]["namespace"]
    assert f"~{name}:{{* ~{name}:meta +config|get {rights[1]}" in scripts["start.sh"]
    (tmp_path / "password").write_text("of-the-store-0123456789\n")
    start = scripts["start.sh"].replace("/run/secrets/bagpipe/store", str(tmp_path / "password"))
    start = start.replace("dir /data", f"dir {tmp_path}\nport 0\nunixsocket {tmp_path}/s.sock\nloglevel notice")
    start = start.replace("exec valkey-server", f"exec {binary}")
    user = {"username": "trainer", "password": "of-the-store-0123456789"}
    with started(start), redis.Redis(unix_socket_path=f"{tmp_path}/s.sock", **user) as client:
        found = client.config_get("append*", "maxmemory-policy")
        assert found["appendonly"] == "yes"
        assert found["appendfsync"] == job["store"]["durability"]
        assert found["maxmemory-policy"] == "noeviction"
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("elsewhere", 1)
        with redis.Redis(unix_socket_path=f"{tmp_path}/s.sock") as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with client.pipeline(transaction=True) as transaction:
            transaction.hset(f"{name}:{{0}}", "field", "row").rpush(f"{name}:{{0}}:log", "field").execute()
    with started(start), redis.Redis(unix_socket_path=f"{tmp_path}/s.sock", **user) as client:
        assert client.exists(f"{name}:{{0}}", f"{name}:{{0}}:log") == 2
