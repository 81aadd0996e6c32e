"""Routes of a cluster's commands: slots to masters, redirections, and commands to send again. Pure: replies in.

    CLUSTER SLOTS reply ──parse_slots──> Topology: the master of each slot
    error line ──parse_redirect──> MOVED: that node from now on       ASK: that node once, after ASKING
                                   WAIT: the same node, a little later     None: a real error
    commands of one node ──NodeCommands.accept──> answered | redirected, or a gap in the log | unanswered
    unserved commands ──in_order──> to send again, in their first order

https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/ describes the replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.keys import NUM_SLOTS
from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.log_guard import ShortLog
from bagpipe.store.redis.passing import is_passing
from bagpipe.store.redis.request_pipeline import Accept, Accepted
from bagpipe.store.redis.resp_rows import ErrorReply
from bagpipe.store.redis.routing import BucketCommand

__all__ = [
    "Address",
    "NodeCommands",
    "PendingCommand",
    "Redirect",
    "RedirectKind",
    "Topology",
    "in_order",
    "parse_redirect",
    "parse_slots",
]

#: Owner of a slot that no node serves.
_NO_OWNER = -1


class Address(NamedTuple):
    """Host and port of a node."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RedirectKind(Enum):
    """Kinds of redirection of a command that a node did not serve."""

    MOVED = auto()
    ASK = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """A node's error reply to a command that it does not serve, or not now.

    Attributes:
        kind: how to go on.
        address: the node that serves the slot; None for WAIT.
        line: the error line, for messages.
    """

    kind: RedirectKind
    address: Address | None
    line: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """Masters and their slots.

    Attributes:
        masters: addresses, without duplicates.
        replicas: addresses of the other nodes, without duplicates; they know the topology too.
        owners: int16 ``[NUM_SLOTS]``, index into `masters`; -1 where no node serves the slot.
    """

    masters: tuple[Address, ...]
    replicas: tuple[Address, ...]
    owners: NDArray[np.int16]

    @property
    def num_covered(self) -> int:
        """Number of slots that some node serves."""
        return int(np.count_nonzero(self.owners != _NO_OWNER))

    def master_of(self, slot: int) -> Address | None:
        """The master of a slot; None if no node serves it."""
        owner = int(self.owners[slot])
        return None if owner == _NO_OWNER else self.masters[owner]

    def with_moved(self, slot: int, address: Address) -> Topology:
        """A copy in which `address` serves `slot`."""
        masters = self.masters if address in self.masters else (*self.masters, address)
        owners = self.owners.copy()
        owners[slot] = masters.index(address)
        return Topology(masters=masters, replicas=self.replicas, owners=owners)


def parse_slots(reply: Sequence[Sequence[Any]], asked: Address) -> Topology:
    """Topology of a CLUSTER SLOTS reply: ``[first slot, last slot, [host, port, ...] of the master, of replicas ...]``.

    Args:
        reply: nested lists, hosts as bytes or None.
        asked: the node that answered. A node that does not know its own host leaves it empty.

    Raises:
        StoreError: the reply is malformed.
    """
    masters: dict[Address, int] = {}
    replicas: dict[Address, None] = {}
    owners = np.full(NUM_SLOTS, _NO_OWNER, np.int16)
    try:
        for first, last, master, *others in reply:
            number = masters.setdefault(_address(master, asked), len(masters))
            owners[int(first) : int(last) + 1] = number
            replicas |= dict.fromkeys(_address(other, asked) for other in others)
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise StoreError(f"{asked}: malformed CLUSTER SLOTS reply ({error})") from None
    return Topology(masters=tuple(masters), replicas=tuple(replicas), owners=owners)


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = (node[0] or b"").decode()
    if not host.isprintable():
        raise ValueError(f"a host named {host[:60]!r}")
    return Address(asked.host if host in _SAME_HOST else host, int(node[1]))


#: Stand for "the host that answered", in CLUSTER SLOTS and in redirections.
_SAME_HOST = ("", "?")


def parse_redirect(line: str, asked: Address) -> Redirect | None:
    """The redirection in an error line; None if it is any other error.

    Args:
        line: without the leading minus.
        asked: the node that answered.
    """
    word, *rest = line.split(" ")
    if is_passing(line):
        return Redirect(kind=RedirectKind.WAIT, address=None, line=line)
    if word not in ("MOVED", "ASK") or len(rest) != 2:
        return None
    host, separator, port = rest[1].rpartition(":")
    if not (separator and port.isdecimal()):
        return None
    address = Address(asked.host if host in _SAME_HOST else host, int(port))
    return Redirect(kind=RedirectKind[word], address=address, line=line)


class PendingCommand(NamedTuple):
    """A command that no node has served yet.

    Attributes:
        group: number of its group in the batch.
        command: rows and bucket.
        redirect: the last node's answer; None: not sent yet, no answer, or no node to send it to.
        gap: set if the bucket's log has a gap before this command: either an earlier command was not served, or the
            store lost groups.
    """

    group: int
    command: BucketCommand
    redirect: Redirect | None = None
    gap: ShortLog | None = None

    @property
    def is_asking(self) -> bool:
        """Whether it goes to `redirect.address`, after ASKING."""
        return self.redirect is not None and self.redirect.kind is RedirectKind.ASK

    def unanswered(self) -> PendingCommand:
        """The command without its last answer."""
        return self._replace(redirect=None, gap=None)


@dataclass(slots=True, kw_only=True, eq=False)
class NodeCommands:
    """Commands in flight to one node. Replies arrive in their order."""

    address: Address
    commands: list[PendingCommand]
    num_answered: int = 0
    redirected: list[PendingCommand] = field(default_factory=list)

    def accept(self, decode: Accept, buffer: Bytes, start: int, end: int) -> int | Accepted | None:
        """Decode the next reply, or note its redirection. See `bagpipe.store.redis.request_pipeline.Accept`."""
        try:
            after = decode(buffer, start, end)
        except ErrorReply as error:
            redirect = parse_redirect(error.line, self.address) if error.start == start else None
            if redirect is None:
                raise
            self.redirected.append(self.commands[self.num_answered]._replace(redirect=redirect, gap=None))
            after = error.end
        except ShortLog as error:
            wait = Redirect(kind=RedirectKind.WAIT, address=None, line=str(error))
            self.redirected.append(self.commands[self.num_answered]._replace(redirect=wait, gap=error))
            after = error.end
        if after is not None:
            self.num_answered += after.num_requests if isinstance(after, Accepted) else 1
        return after

    def unserved(self) -> list[PendingCommand]:
        """Commands to send again."""
        return [*self.redirected, *(command.unanswered() for command in self.commands[self.num_answered :])]


def in_order(pending: list[PendingCommand]) -> list[PendingCommand]:
    """Sort commands as they were first sent, the order in which a bucket's log accepts them.

    Raises:
        ShortLog: the first command of a bucket met a gap in its log, so the store lost groups.
    """
    pending.sort(key=lambda command: (command.group, command.command.start))
    seen: set[int] = set()
    for _, command, _, gap in pending:
        if gap is not None and command.bucket not in seen:
            raise gap
        seen.add(command.bucket)
    return pending
