"""Which node of a cluster has which hash slot, and what a node answers when it has not. Pure: replies in, tables out.

    CLUSTER SLOTS reply ──parse_slots──> Topology: master address of each slot
    error line          ──parse_redirect──> MOVED: ask there from now on     ASK: ask there once, after ASKING
                                            WAIT: the same again, a little later     none of them: a real error

https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/ describes the replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.keys import NUM_SLOTS

__all__ = ["Address", "Redirect", "RedirectKind", "Topology", "parse_redirect", "parse_slots"]

#: Owner of a slot that no node serves.
_NOBODY = -1


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RedirectKind(Enum):
    """What to do with a command that was not served."""

    MOVED = auto()
    ASK = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """A node's answer to a command that it does not serve, or not now.

    Attributes:
        kind: what to do.
        address: who serves it; None for WAIT.
        line: the answer itself, for messages.
    """

    kind: RedirectKind
    address: Address | None
    line: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """Masters and their slots.

    Attributes:
        masters: addresses, each once.
        replicas: addresses of the other nodes, each once; they know the topology too.
        owners: int16 ``[NUM_SLOTS]``, index into `masters`; -1 where no node serves the slot.
    """

    masters: tuple[Address, ...]
    replicas: tuple[Address, ...]
    owners: NDArray[np.int16]

    @property
    def num_covered(self) -> int:
        """Slots that some node serves."""
        return int(np.count_nonzero(self.owners != _NOBODY))

    def master_of(self, slot: int) -> Address | None:
        """Who serves a slot; None: nobody."""
        owner = int(self.owners[slot])
        return None if owner == _NOBODY else self.masters[owner]

    def with_moved(self, slot: int, address: Address) -> Topology:
        """The same with one slot served elsewhere."""
        masters = self.masters if address in self.masters else (*self.masters, address)
        owners = self.owners.copy()
        owners[slot] = masters.index(address)
        return Topology(masters=masters, replicas=self.replicas, owners=owners)


def parse_slots(reply: Sequence[Sequence[Any]], asked: Address) -> Topology:
    """Topology of a CLUSTER SLOTS reply: ``[first slot, last slot, [host, port, ...] of the master, of replicas ...]``.

    Args:
        reply: nested lists, hosts as bytes or None.
        asked: who answered; a node that does not know its own host leaves it out, meaning this one.

    Raises:
        StoreError: the reply has another form.
    """
    masters: dict[Address, int] = {}
    replicas: dict[Address, None] = {}
    owners = np.full(NUM_SLOTS, _NOBODY, np.int16)
    try:
        for first, last, master, *others in reply:
            number = masters.setdefault(_address(master, asked), len(masters))
            owners[int(first) : int(last) + 1] = number
            replicas |= dict.fromkeys(_address(other, asked) for other in others)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise StoreError(f"{asked}: CLUSTER SLOTS answered something else than slots ({error})") from None
    return Topology(masters=tuple(masters), replicas=tuple(replicas), owners=owners)


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = (node[0] or b"").decode()
    return Address(asked.host if host in _SAME_HOST else host, int(node[1]))


#: What stands for "the host you asked", in a list of slots and in a redirection.
_SAME_HOST = ("", "?")

#: The same command may succeed a little later. READONLY: the node became a replica, and the topology has not said so.
_WAIT = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "READONLY", "MASTERDOWN"})


def parse_redirect(line: str, asked: Address) -> Redirect | None:
    """What an error line asks for; None if it is an error like any other.

    Args:
        line: without the leading minus.
        asked: who answered.
    """
    word, *rest = line.split(" ")
    if word in _WAIT:
        return Redirect(kind=RedirectKind.WAIT, address=None, line=line)
    if word not in ("MOVED", "ASK") or len(rest) != 2:
        return None
    host, separator, port = rest[1].rpartition(":")
    if not (separator and port.isdecimal()):
        return None
    address = Address(asked.host if host in _SAME_HOST else host, int(port))
    return Redirect(kind=RedirectKind[word], address=address, line=line)
