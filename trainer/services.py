"""`Services`: addresses of a job's cacher and store. Rank 0 starts those that the configuration does not name.

one host       cacher and store on unix sockets
several hosts  cacher on rank 0's address with a secret generated for the job; the configuration must name a store
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bagpipe.config.sections import Config
from bagpipe.distributed.membership import local_address
from bagpipe.errors import InputError
from bagpipe.jobs.ranks import Ranks
from bagpipe.store.passwords import with_password
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.types.schema import DataSchema
from bagpipe.util.programs import command_of
from bagpipe.util.redaction import redacted_repr
from bagpipe.util.secret_files import STORE_PASSWORD, read_secret
from bagpipe.util.temporary_folder import temporary_folder
from cacher.embedded import EmbeddedCacher
from cacher.planning import PlannedData

__all__ = ["Services", "data_identity", "open_cacher", "open_services", "url_of_store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Addresses of the cacher and the store.

    Attributes:
        cacher_url, secret: the cacher. The secret is empty if the configuration names its file or none is needed.
        store_url: the store.
        job_id: identifies the trainers of one job to the cacher.
    """

    cacher_url: str
    secret: str = field(repr=False)
    store_url: str
    job_id: str = field(repr=False)

    def __repr__(self) -> str:
        return redacted_repr(self)


def open_cacher(config: Config, stack: ExitStack) -> str:
    """Start a cacher of this process's own. Returns its URL; `stack` stops it.

    Raises:
        InputError: the data cannot be opened.
    """
    return stack.enter_context(EmbeddedCacher(config)).url


def data_identity(config: Config) -> tuple[BatchIdentity, DataSchema]:
    """What a cacher of this job would say of its data: the identity of its batches, and their columns.

    Raises:
        InputError: the data cannot be opened.
    """
    planned = PlannedData(config.data, config.run.seed)
    return planned.identity, planned.schema


def open_services(config: Config, ranks: Ranks, stack: ExitStack, phase: Callable[..., object]) -> Services:
    """Start the services that the configuration does not name. `stack` of rank 0 stops them. `phase` is told of each.

    Raises:
        InputError: the data cannot be opened, or the ranks have no common store.
    """
    hosts = ranks.gather({"host": _host(), "address": _address(ranks)})
    num_hosts = len({item["host"] for item in hosts})
    if num_hosts > 1 and not config.store.url:
        raise InputError(
            f"store.url is empty, but the job's ranks are on {num_hosts} hosts: name a server that all hosts can reach"
        )
    services: Services | None = None
    if ranks.is_first:
        cacher_url, secret = config.cacher.url, ""
        store_url = url_of_store(config)
        if not cacher_url:
            listen = ""
            if num_hosts > 1:
                others = [item["address"] for item in hosts if item["host"] != hosts[0]["host"]]
                listen, secret = f"{_address_towards(others)}:0", secrets.token_hex(32)
            phase("starting the cacher")
            cacher_url = stack.enter_context(EmbeddedCacher(config, listen=listen, secret=secret)).url
        if not store_url:
            folder = config.run.dir or stack.enter_context(temporary_folder())
            phase("starting the store")
            server = stack.enter_context(EmbeddedServer(Path(folder), durability=config.store.durability))
            phase("store started", server=server.description)
            store_url = server.url
        services = Services(cacher_url=cacher_url, secret=secret, store_url=store_url, job_id=secrets.token_hex(16))
    return Services(**ranks.share(asdict(services) if services is not None else None))


def url_of_store(config: Config) -> str:
    """`store.url` with the password that is given apart; empty if it names no server."""
    if not config.store.url:
        return ""
    password = read_secret(config.store.password_file, subject="store.password_file", variable=STORE_PASSWORD)
    return with_password(config.store.url, password)


def _host() -> str:
    """Id of the host: equal for processes that share the kernel, the network namespace and the mount namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/mnt")])
    except OSError:  # not Linux
        return socket.gethostname()


def _address(ranks: Ranks) -> str:
    """This host's address on the route to the job's key-value store; empty if other hosts cannot reach it."""
    if ranks.membership is None:
        return ""
    address = local_address(ranks.membership.address, ranks.membership.port) or ""
    return "" if address.startswith("127.") else address


def _address_towards(others: list[str]) -> str:
    """This host's address on the route to other hosts."""
    for other in others:
        address = local_address(other, 1) if other else None
        if address is not None:
            return address
    raise InputError(
        "cacher.url is empty, and rank 0 has no address that the other hosts can reach: start a cacher with "
        f"{command_of('cacher')} and set cacher.url"
    )
