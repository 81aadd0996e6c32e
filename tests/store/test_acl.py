"""The ACL users of the documents: their rights suffice for a job, also over a restart, and each one is needed."""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.errors import InputError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import DeleteRequest
from bagpipe.store.keys import bucket_key, bucket_of, key_slot
from bagpipe.store.redis.server_checks import REQUIRED_COMMANDS
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer, installed_servers
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import ClusterNodes

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=4),), optimizer="sgd")
IDS = np.arange(100, dtype=np.int64)
ROWS = np.arange(400, dtype=np.float32).reshape(100, 4)
ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "store.md"
SERVERS = list(installed_servers())


#: Rights that these tests do not exercise; see the first test.
_NOT_MISSED = {"hkeys", "select", "acl|dryrun"}


def documented(number: int) -> list[str]:
    """Words of the ACL SETUSER line in docs/store.md for a server (0) or a cluster (1)."""
    lines = re.findall(r"^ACL SETUSER trainer (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    return str(lines[number]).split()


def documented_default_users() -> dict[str, str]:
    """Rules of the default user by place in a document, in the words of a configuration file."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*"), *ROOT.glob("deploy/**/*")]
    found = {}
    for file in sorted(path for path in files if path.is_file()):
        for match in re.finditer(r"(?:user|SETUSER) default ([^`\n]+)", file.read_text(errors="replace")):
            found[f"{file.relative_to(ROOT)} at {match.start()}"] = match[1]
    return found


@contextmanager
def server_with_users(binary: Path, folder: Path, *users: str) -> Iterator[str]:
    """A server with an append-only file in the folder, and these users. The URL is that of the trainer."""
    lines = ("port 0", f"dir {folder}", f"unixsocket {folder}/s", "appendonly yes", 'save ""', "loglevel notice")
    (folder / "server.conf").write_text("\n".join([*lines, *(f"user {user}" for user in users)]))
    command = [str(binary), str(folder / "server.conf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            said = []
            for line in server.stdout:
                said.append(line)
                if "eady to accept connections" in line:
                    break
            else:
                pytest.fail("".join(said))
            yield f"unix://trainer:secret@{folder}/s"
        finally:
            server.terminate()
            server.communicate()


def set_user(client: redis.Redis, rules: list[str], *changes: str) -> None:
    words = [">secret" if rule.startswith(">") else rule for rule in rules]
    client.execute_command("ACL", "SETUSER", "trainer", "reset", *words, *changes)


def denials(client: redis.Redis) -> list[object]:
    """Denied commands, except those of redis-py's handshake."""
    return [entry for entry in client.acl_log() if entry["object"] != "client|setinfo"]


def commands_of(rules: list[str]) -> set[str]:
    return {rule.removeprefix("+") for rule in rules if rule.startswith("+")}


def run_a_job(url: str, namespace: str = "bagpipe") -> None:
    """All store calls of a job, twice: recovery, rows, checkpoints, inspection, loss of the namespace."""
    for generation in range(2):
        with RedisStore(url, schema=SCHEMA, namespace=namespace) as store:
            store.check()
            store.claim()
            with store.ledger() as ledger:
                play(store, ledger, f"{generation}-{uuid.uuid4().hex}")


def play(store: RedisStore, ledger: Ledger, token: str) -> None:
    ledger.state()
    ledger.acquire(token)
    for bucket in range(ledger.num_buckets):
        ledger.touched(bucket)
    ledger.drop(0)
    ledger.delete(np.zeros(len(IDS), np.uint32), IDS)
    store.fence(Fence(token=token, writer=0, epoch=0))
    store.write(0, IDS, ROWS)
    ledger.begin("m:0", 1, num_groups=store.rotate().tolist())
    store.fence(Fence(token=token, writer=0, epoch=1))
    assert (store.read(0, IDS).rows == ROWS).all()
    store.write(0, IDS, ROWS)
    num_groups = store.rotate().tolist()
    ledger.inspect()
    ledger.commit("m:1", 1, [num_groups])
    store.delete_many([DeleteRequest(0, IDS)])
    store.write(0, IDS, ROWS)
    assert (store.ids(0) == IDS).all()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "own") as server:
        yield server


def login(url: str, password: str = "secret", user: str = "trainer") -> str:
    return url.replace("://", f"://{user}:{password}@", 1)


def test_the_documented_user_has_exactly_the_needed_rights(own_server: EmbeddedServer) -> None:
    rules = documented(0)
    with client_of(own_server.url) as client:
        set_user(client, rules)
        client.config_resetstat()
        run_a_job(login(own_server.url))
        assert denials(client) == []
        called = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    ours = {"acl|log", "config|resetstat", "auth", "client|setinfo"}
    # HKEYS is for servers without HSCAN NOVALUES, SELECT for a URL with a database, UNWATCH for two jobs that claim
    # one namespace at the same time, RPOP for a group that was sent twice, PTTL for keys that expired, ACL DRYRUN for
    # servers with an append-only file.
    rare = {"hkeys", "select", "unwatch", "rpop", "pttl", "acl|dryrun"}
    assert called - ours - {"hkeys"} == commands_of(rules) - rare
    assert commands_of(rules) == {*REQUIRED_COMMANDS, "hkeys", "select", "acl|dryrun"}


def trainer(*changes: str) -> str:
    """The documented user of a server, in the words of a configuration file."""
    rules = [">secret" if rule.startswith(">") else rule for rule in documented(0)]
    return " ".join(["trainer", *rules, *changes])


@pytest.mark.parametrize("rules", sorted(set(documented_default_users().values())))
@pytest.mark.parametrize("binary", SERVERS, ids=lambda path: path.name)
def test_rows_survive_a_restart_under_the_documented_users(binary: Path, rules: str, tmp_path: Path) -> None:
    users = (f"default {rules}", trainer())
    with server_with_users(binary, tmp_path, *users) as url:
        run_a_job(url)
        with RedisStore(url, schema=SCHEMA) as store, store.ledger() as ledger:
            before = ledger.state()
    assert all(bucket.logs for bucket in before)
    with server_with_users(binary, tmp_path, *users) as url:
        with RedisStore(url, schema=SCHEMA) as store, store.ledger() as ledger:
            assert ledger.state() == before
            assert (store.read(0, IDS).rows == ROWS).all()
        with pytest.raises(InputError, match="user or password refused"):
            run_a_job(url.replace("trainer:secret@", ""))


@pytest.mark.parametrize("rules", ["off", "off ~bagpipe:* +@read", "on >other ~* +@all -hset"])
@pytest.mark.parametrize("binary", SERVERS, ids=lambda path: path.name)
def test_a_server_that_would_drop_transactions_is_refused(
    binary: Path, rules: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused are exactly the servers that do."""
    refusals = []
    for changes in (("+acl|dryrun",), ("-acl|dryrun",)):
        with server_with_users(binary, tmp_path, f"default {rules}", trainer(*changes)) as url:
            store = RedisStore(url, schema=SCHEMA)
            with client_of(url) as client, client.pipeline(transaction=True) as transaction:
                transaction.hset("bagpipe:{0}:test", "a", "1")
                transaction.hset("bagpipe:{0}:test", "b", "2")
                transaction.execute()
            for call in (store.check, store.claim):
                try:
                    with store:
                        call()
                except InputError as error:
                    refusals.append(str(error))
    with server_with_users(binary, tmp_path, f"default {rules}", trainer()) as url, client_of(url) as client:
        is_lost = not client.exists("bagpipe:{0}:test")
    warned = [record.getMessage() for record in caplog.records if "does not tell" in record.getMessage()]
    if not is_lost:
        assert not refusals
        assert not warned
        return
    assert len(refusals) == 2
    assert len(warned) == 1
    for line in refusals:
        assert re.search(
            r"would lose rows when it is restarted.*'hset'.*run ACL SETUSER default off ~\* &\* \+@all", line
        )
        assert "\n" not in line


def test_the_documents_switch_the_default_user_off() -> None:
    places = documented_default_users()
    assert {place.partition(" at ")[0] for place in places} >= {
        "deploy/kubernetes/store.yaml", "docs/store.md", "docs/threat-model.md"
    }  # fmt: skip
    assert all(rules.startswith("off ") for rules in places.values())


def test_the_proposed_user_may_follow_a_cluster(redis_cluster: ClusterNodes, namespace: str) -> None:
    rules = [rule.replace("bagpipe", namespace) for rule in documented(1)]
    assert commands_of(rules) == commands_of(documented(0)) - {"select"} | {"asking", "cluster|slots"}
    bucket = int(bucket_of(np.zeros(1, np.uint32), IDS[:1], 64)[0])
    nodes, slot = redis_cluster, key_slot(bucket_key(namespace, bucket))
    source = nodes.owner_of(slot)
    target = next(node for node in nodes.masters if node is not source)
    for node in nodes.masters:
        set_user(node.client, rules)
        node.client.acl_log_reset()
    try:
        run_a_job(login(nodes.url), namespace)
        nodes.begin_move(slot, source, target)
        nodes.move_keys(slot, source, target)
        with RedisStore(login(nodes.url), schema=SCHEMA, namespace=namespace) as store:
            assert (store.read(0, IDS).rows == ROWS).all()
            assert store.statistics().asked > 0
        nodes.end_move(slot, target)
        run_a_job(login(nodes.url), namespace)
        for node in nodes.masters:
            assert denials(node.client) == []
    finally:
        nodes.move_keys(slot, source, target)
        nodes.end_move(slot, target)
        nodes.move(slot, target, source)
        for node in nodes.masters:
            node.client.acl_deluser("trainer")


@pytest.mark.parametrize("command", sorted(commands_of(documented(0)) - _NOT_MISSED))
def test_a_command_that_is_denied(own_server: EmbeddedServer, command: str) -> None:
    with client_of(own_server.url) as client:
        set_user(client, documented(0), f"-{command}")
        with pytest.raises(InputError, match=f"may not run .* needed: .*'{command}'") as caught:
            run_a_job(login(own_server.url))
        client.execute_command("ACL", "SETUSER", "trainer", f"+{command}")
        assert not client.exists("bagpipe:meta"), "something was written"
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_cluster_that_hides_its_nodes(redis_cluster: ClusterNodes, namespace: str) -> None:
    for node in redis_cluster.masters:
        set_user(node.client, [rule.replace("bagpipe", namespace) for rule in documented(1)], "-cluster|slots")
    try:
        with pytest.raises(InputError, match=r"may not run a command that is needed.*'cluster\|slots'") as caught:
            run_a_job(login(redis_cluster.url), namespace)
        assert "secret" not in str(caught.value)
    finally:
        for node in redis_cluster.masters:
            node.client.acl_deluser("trainer")


@pytest.mark.parametrize("neighbour", ["other", "bagpipe2", "bagpipe:eu", "bagpipe:meta", "bagpipe:", "bagpip"])
def test_another_namespace(own_server: EmbeddedServer, neighbour: str) -> None:
    """Also one whose name begins with this user's namespace."""
    with client_of(own_server.url) as client:
        set_user(client, documented(0))
        with RedisStore(own_server.url, schema=SCHEMA, namespace=neighbour) as store:
            store.claim()
            store.write(0, IDS, ROWS)
        with pytest.raises(InputError, match=r"may not run a command that is needed: .*key"):
            run_a_job(login(own_server.url), neighbour)
        with client_of(login(own_server.url)) as user:
            for key in client.scan_iter():
                with pytest.raises(redis.exceptions.NoPermissionError):
                    user.exists(key)


def test_rights_taken_away_while_the_job_runs(own_server: EmbeddedServer) -> None:
    with client_of(own_server.url) as client:
        set_user(client, documented(0))
        with RedisStore(login(own_server.url), schema=SCHEMA) as store:
            store.write(0, IDS, ROWS)
            client.execute_command("ACL", "SETUSER", "trainer", "-hset")
            with pytest.raises(StoreError, match=r"NOPERM .*'hset'.*; the user of store.url lacks this right"):
                store.write(0, IDS, ROWS)


@pytest.mark.parametrize(
    ("user", "password"),
    [("trainer", "wr0ng"), ("nobody", "secret"), ("trainer", "")],
    ids=["wrong password", "no such user", "no password"],
)
def test_an_unknown_user(own_server: EmbeddedServer, redis_cluster: ClusterNodes, user: str, password: str) -> None:
    with client_of(own_server.url) as client:
        set_user(client, documented(0))
    for url in (own_server.url, redis_cluster.url):
        with pytest.raises(
            InputError, match=r"refused: check both in store\.url, and the password in store\.password_file"
        ) as caught:
            run_a_job(login(url, password, user))
        message = str(caught.value)
        assert "\n" not in message
        assert not password or password not in message
