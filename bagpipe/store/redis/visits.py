"""Commands on their way to the nodes of a cluster, and what is to be sent again. Pure: replies in, errands out.

errands of one node ──NodeCommands.accept──> answered | redirected, or met a gap in their log | never answered
all that was not served ──in_order──> to be sent again, as it was first sent
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from bagpipe.store.redis.fenced_write import ShortLog
from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.request_pipeline import Accept
from bagpipe.store.redis.resp_rows import ErrorReply
from bagpipe.store.redis.routing import BucketCommand
from bagpipe.store.redis.topology import Address, Redirect, RedirectKind, parse_redirect

__all__ = ["NodeCommands", "PendingCommand", "Unserved", "in_order"]


class PendingCommand(NamedTuple):
    """One command of one group, and whether it goes after ASKING."""

    group: int
    command: BucketCommand
    is_asking: bool


class Unserved(NamedTuple):
    """An errand to send again, and what its node said; None: the node is gone, or has none.

    `gap`: the bucket's log has no place for it. An errand before it was not served either, or the store lost groups.
    """

    errand: PendingCommand
    redirect: Redirect | None
    gap: ShortLog | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class NodeCommands:
    """Errands on their way to one node. Replies come in their order."""

    address: Address
    errands: list[PendingCommand]
    num_answered: int = 0
    redirects: list[Unserved] = field(default_factory=list)

    def accept(self, decode: Accept, buffer: Bytes, start: int, end: int) -> int | None:
        """Decode the next reply, or note the redirection. See `bagpipe.store.redis.request_pipeline.Accept`."""
        try:
            after = decode(buffer, start, end)
        except ErrorReply as error:
            redirect = parse_redirect(error.line, self.address) if error.start == start else None
            if redirect is None:
                raise
            self.redirects.append(Unserved(self.errands[self.num_answered], redirect))
            after = error.end
        except ShortLog as error:
            wait = Redirect(kind=RedirectKind.WAIT, address=None, line=str(error))
            self.redirects.append(Unserved(self.errands[self.num_answered], wait, error))
            after = error.end
        if after is not None:
            self.num_answered += 1
        return after

    def unserved(self) -> list[Unserved]:
        """What is to be sent again."""
        return [*self.redirects, *(Unserved(errand, None) for errand in self.errands[self.num_answered :])]


def in_order(unserved: list[Unserved]) -> list[Unserved]:
    """As they were first sent, so that a bucket's log takes them.

    Raises:
        ShortLog: the first of a bucket met a gap in its log.
    """
    unserved.sort(key=lambda again: (again.errand.group, again.errand.command.start))
    seen: set[int] = set()
    for errand, _, gap in unserved:
        if gap is not None and errand.command.bucket not in seen:
            raise gap
        seen.add(errand.command.bucket)
    return unserved
