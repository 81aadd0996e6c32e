"""`Ranks`: the ranks of a job as the job sees them. A job of one rank has no peers, and every word is its own.

open_ranks(place) ─> TorchPeers or none ─> gather, share, collect ─> check_same: whoever differs is named
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagpipe.client.agreement import first_difference
from bagpipe.config.sections import Config
from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError
from bagpipe.store.redis.urls import redact
from trainer.process import following_launcher

__all__ = ["Ranks", "check_same", "common_settings", "config_of_rank", "open_ranks", "path_of_rank"]

#: Keys in which ranks may differ: where a rank leaves its files, and where a host keeps its secrets.
_KEYS_OF_ONE_RANK = frozenset(
    {"run.trace", "run.tensorboard", "run.dir"}
    | {f"cacher.{name}" for name in ("secret_file", "tls_ca", "tls_cert", "tls_key")}
)


class Ranks:
    """All ranks of a job. Called by the main thread, the same calls in the same order on every rank.

    Args:
        peers: the others, entered; None if there are none.
        place: which rank this is; None for the only one.
    """

    def __init__(self, peers: TorchPeers | None = None, place: Membership | None = None) -> None:
        self.peers = peers
        self.place = place
        self.rank = place.rank if place is not None else 0
        self.world_size = place.world_size if place is not None else 1

    @property
    def is_first(self) -> bool:
        """Rank 0, which starts, prints and writes for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, by rank."""
        return [value] if self.peers is None else self.peers.gather(value)

    def share(self, value: Any) -> Any:
        """Rank 0's JSON-able value, at every rank, however long rank 0 takes."""
        return value if self.peers is None else self.peers.share(value)

    def collect(self, values: Tensor) -> Tensor:
        """All ranks' 1-D host tensors, one after the other, at rank 0; nothing at the others."""
        if self.peers is None:
            return values
        return torch.cat([values.new_empty(0), *self.peers.collect(values)])

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the others of an error that leaves the block, before anything else is done about it."""
        try:
            yield
        except BaseException as error:
            if self.peers is not None:
                self.peers.report(error)
            raise

    def listen(self, on_failure: Callable[[BaseException], None]) -> None:
        """Hear of other ranks' failures, from another thread."""
        if self.peers is not None:
            self.peers.listen(on_failure)


@contextmanager
def open_ranks(place: Membership | None, *, timeout_s: float, device: str) -> Iterator[Ranks]:
    """Meet the other ranks. An error that leaves the block is told to them before anything else.

    Raises:
        PeerError: they cannot be reached.
        InputError, PeerError, SystemExit: another rank failed first.
    """
    if torch.device(device).index is not None:
        # Of this thread; lanes get theirs with their streams. Otherwise it would begin to use the first one, too.
        torch.cuda.set_device(device)
    if place is None:
        yield Ranks()
        return
    with ExitStack() as stack:
        with following_launcher():
            peers = stack.enter_context(TorchPeers(place, timeout_s=timeout_s, device=device))
        yield Ranks(peers, place)


def config_of_rank(config: Config, place: Membership | None) -> Config:
    """The configuration with this rank's device.

    Raises:
        InputError: something that several ranks cannot share.
    """
    if place is None:
        return config
    if config.store.url.startswith("memory:"):
        raise InputError(
            f"store.url is {config.store.url}, which one rank alone can see; {place.world_size} ranks need a server: "
            "leave it empty, or name one"
        )
    device = config.run.device
    if device.startswith("cuda:"):
        raise InputError(f"run.device is {device}, but each of {place.world_size} ranks needs its own: say cuda")
    if device == "cuda":
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, device=f"cuda:{place.local_rank}"))
    return config


def path_of_rank(path: str, rank: int) -> str:
    """``trace.json`` at rank 0, ``trace.rank2.json`` at rank 2; an empty path stays empty."""
    if not path or rank == 0:
        return path
    name = Path(path)
    return str(name.with_name(f"{name.stem}.rank{rank}{name.suffix}"))


def common_settings(config: Config) -> dict[str, Any]:
    """Values of all keys that must be the same on every rank, by dotted key; JSON-able."""
    settings: dict[str, Any] = {}
    for section, values in dataclasses.asdict(config).items():
        for name, value in values.items():
            settings[f"{section}.{name}"] = list(value) if isinstance(value, tuple) else value
    settings["run.device"] = config.run.device.partition(":")[0]
    return {key: value for key, value in settings.items() if key not in _KEYS_OF_ONE_RANK}


def check_same(ranks: Ranks, values: Mapping[str, Any], what: str) -> None:
    """Raise InputError, on every rank the same, if the ranks' values differ: the name, both values, both ranks.

    Args:
        ranks: who is asked.
        values: this rank's, by name; JSON-able.
        what: what they are, for the message.
    """
    everyones = ranks.gather(dict(values))
    for rank, others in enumerate(everyones[1:], start=1):
        difference = first_difference(everyones[0], others)
        if difference is not None:
            # A store's URL may hold a password.
            first, second = redact(str(difference.first)), redact(str(difference.second))
            raise InputError(
                f"the ranks' {what} differ: {difference.path} is {first} on rank 0 and {second} on rank {rank}"
            )
