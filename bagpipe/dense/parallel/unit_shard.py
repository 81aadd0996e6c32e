"""`UnitShard`: one rank's share of a unit, its gradients and the unit's whole parameters while they are here.

    gradient of a parameter ──take──> send ─all-to-all: share r of every rank's gradients to rank r─> received
        rank r: gradient share = ((first's + second's) + third's) + …          ──land──> gradients of the segments
    segments ──the optimizer's step──> share ──all-gather──> whole: the parameters of the model are views of it
    release ──> parameters are closed (`closed_parameter`), what autograd has saved of them is a place (`saved_places`)
    live_apart: segments, and below level parameters the parameters too, lie in memory of others, such as chunks;
        flat buffers are there for an exchange only

Each element is summed on its own, in rank order, as `bagpipe.dense.parallel.buckets` does: the bits are those of the
replicated sum, and an optimizer that treats each element on its own steps a segment as it steps a whole tensor.
One flag per parameter travels behind each share: a parameter without a gradient on any rank keeps none, and the flag is
NaN where a gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.buckets import check_gradient
from bagpipe.dense.parallel.closed_parameter import Left, absent, close, open_again
from bagpipe.dense.parallel.shard_layout import FlatLayout, Piece, Segment, flat_layout
from bagpipe.dense.parallel.shard_units import ParameterUnit
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.types.shard_level import ShardLevel

__all__ = ["UnitShard"]


class UnitShard:
    """The unit's parameters become views of one flat buffer.

    Args:
        unit: its parameters have their initial values, equal on all ranks.
        level: what is divided.
        rank: of this process, among those that have shares.
        num_ranks: their number.

    Attributes:
        name: of the unit.
        module: whose forward uses the parameters.
        names, parameters: of the model.
        layout: of the flat buffer.
        own: this rank's part of each parameter.
        segments: the same as parameters of an optimizer, 1-D views of the share.
        is_here: the parameters of the model have their values.
        num_sent_bytes: sent to other ranks so far.
    """

    def __init__(self, unit: ParameterUnit, *, level: ShardLevel, rank: int, num_ranks: int) -> None:
        self.name = unit.name
        self.module = unit.module
        self.names = tuple(name for name, _ in unit.parameters)
        self.parameters = tuple(parameter for _, parameter in unit.parameters)
        self.layout: FlatLayout = flat_layout([parameter.numel() for parameter in self.parameters], num_ranks)
        self.own: tuple[Segment, ...] = self.layout.segments(rank)
        self.is_here = True
        self.num_sent_bytes = 0
        self._keeps_gradients = level == "optimizer"
        self._releases = level == "parameters"
        self._is_apart = self._keeps_share = False
        self._range = slice(rank * self.layout.share, (rank + 1) * self.layout.share)
        self._left = Left()
        self._copies: tuple[tuple[nn.Parameter, ...], ...] = ()
        self._whole: Tensor | None = self._flatten()
        self._share = self.whole[self._range]
        if level == "parameters":
            self._share = self._share.clone()
        self.segments = tuple(nn.Parameter(self._share[s.offset : s.offset + s.length]) for s in self.own)
        self._rows = [self.layout.segments(row) for row in range(num_ranks)]
        self._send: Tensor | None = None
        self._tail: Tensor  # sums of the flags and of the mark
        self._sums: list[Tensor] = []
        self._largest: dict[str, Tensor] = {}

    def _flatten(self) -> Tensor:
        flat = self.parameters[0].detach().new_zeros(self.layout.length)
        for part, parameter in zip(self._parts(flat), self.parameters, strict=True):
            part.copy_(parameter.detach())
            if parameter.device.type == "cpu":
                self._left.add(parameter.detach())
            parameter.data = part
        return flat

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        """A buffer as the parameters."""
        for start, parameter in zip(self.layout.starts, self.parameters, strict=True):
            yield flat[start : start + parameter.numel()].view(parameter.shape)

    # ---- parameters ----------------------------------------------------------------------------------------------

    @property
    def whole(self) -> Tensor:
        """The whole parameters, or room for them: the flat buffer."""
        assert self._whole is not None, "allocated, and not released"
        return self._whole

    def live_apart(self, *, keeps_share: bool = False) -> None:
        """Have segments lie where their `data` is, which others decide; and so parameters, unless they are divided.

        Gradients are freed as soon as they are sent.

        Args:
            keeps_share: gathers use the copy of the latest `copy_share`; otherwise each reads the segments, or a copy
                once.
        """
        self._is_apart, self._keeps_gradients, self._keeps_share = True, False, keeps_share
        self._share = self._share.new_empty(0)
        if not self._releases:
            self._whole = None

    def allocate(self) -> None:
        """Make room for the whole parameters."""
        if self._whole is None:
            self._whole = self._share.new_empty(self.layout.length)

    def gather(self, group: RankGroup) -> None:
        """Fill the whole parameters with the shares of all ranks. There is room.

        Raises:
            PeerError: a peer is gone or silent.
        """
        if self._is_apart and not self._share.numel():
            self.copy_share()
        own, whole = self._share, self.whole
        group.all_gather(whole, own.clone() if own.data_ptr() == whole[self._range].data_ptr() else own)
        self.num_sent_bytes += own.nbytes * (self.layout.num_ranks - 1)
        if self._is_apart and not self._keeps_share:
            self._share = own.new_empty(0)

    def copy_share(self) -> None:
        """Copy segments that lie apart to one share, for the next gather; without this the gather does it."""
        self._share = self._share.new_zeros(self.layout.share)
        for place, segment in zip(self.own, self.segments, strict=True):
            self._share[place.offset : place.offset + place.length].copy_(segment.detach())

    @property
    def is_gathered(self) -> bool:
        """The flat buffer is here."""
        return self._whole is not None

    def follow(self, copies: Sequence[Sequence[nn.Parameter]]) -> None:
        """Treat other tensors as the parameters are: the whole ones are here, and these are views of them.

        Args:
            copies: of each one per parameter, in their order. They replace those of an earlier call.
        """
        for parameter in (parameter for copy in self._copies for parameter in copy):
            close(parameter)
            parameter.data = absent(parameter)
        self._copies = tuple(map(tuple, copies))

    def arrive(self) -> bool:
        """The whole parameters are gathered: those of the model have their values. Idempotent.

        Returns:
            Whether they are views of the flat buffer; otherwise it is gone.
        """
        if self._is_apart and not self._releases:
            for part, parameter in zip(self._parts(self.whole), self.parameters, strict=True):
                parameter.detach().copy_(part)
            self._whole = None
            return False
        if not self.is_here:
            for part, parameters in zip(self._parts(self.whole), self._named(), strict=True):
                for parameter in parameters:
                    parameter.data = part
            self.is_here = True
        return True

    def release(self) -> None:
        """Let go of the whole parameters; the share stays. Idempotent."""
        if self.is_here:
            self.close()
            for parameter in (parameter for parameters in self._named() for parameter in parameters):
                parameter.data = absent(parameter)
            self._left.add(self.whole)
            self._whole, self.is_here = None, False

    def close(self) -> None:
        """Refuse uses of the parameters: the unit's forward is not under way."""
        for parameter in (parameter for parameters in self._named() for parameter in parameters):
            close(parameter)

    def open(self) -> None:
        """Allow uses of the parameters, which are here."""
        for parameter in (parameter for parameters in self._named() for parameter in parameters):
            open_again(parameter)

    def _named(self) -> Iterator[tuple[nn.Parameter, ...]]:
        """Each parameter of the model and its copies."""
        return zip(self.parameters, *self._copies, strict=True)

    def check_left(self) -> None:
        """Check that nothing has kept a view of memory that the parameters had before.

        Raises:
            InputError: something has: it would not see the parameters change.
        """
        if self._left.are_held():
            raise InputError(
                f"dense.shard: something keeps a view of a parameter of layer {self.name}, which would not follow its "
                f"changes: expected parameters that are used by their names, in the forward of their layer"
            )

    def has(self, tensor: Tensor) -> bool:
        """A tensor lies in the whole parameters."""
        return self._whole is not None and tensor.untyped_storage()._cdata == self._whole.untyped_storage()._cdata

    def adopt(self) -> None:
        """Take the share from the whole parameters, which were loaded."""
        if self._is_apart:
            for place, segment, parameter in zip(self.own, self.segments, self.parameters, strict=True):
                segment.detach().copy_(parameter.detach().reshape(-1)[place.first : place.end])
        elif self._share.data_ptr() != self.whole[self._range].data_ptr():
            self._share.copy_(self.whole[self._range])

    def joined(self, position: int, part: Tensor, group: RankGroup) -> Tensor:
        """A tensor in the shape of a parameter, of the ranks' segments of it. All ranks call it.

        Raises:
            PeerError: a peer is gone or silent.
        """
        segments = [segments[position] for segments in self._rows]
        widest = max(segment.length for segment in segments)
        padded = part.new_zeros(widest)
        padded[: part.numel()].copy_(part.detach())
        gathered = part.new_empty(len(segments) * widest)
        group.all_gather(gathered, padded)
        rows = gathered.view(len(segments), widest)
        whole = torch.cat([row[: segment.length] for row, segment in zip(rows, segments, strict=True)])
        return whole.view(self.parameters[position].shape)

    def join(self, parts: Mapping[str, Tensor], group: RankGroup) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors of those parameters of which the ranks' segments of a tensor are given. One exchange.

        Args:
            parts: this rank's segments, by name of the parameter; others of the unit's are left out. One dtype.
            group: the ranks that have shares. All of them call it with the same names.

        Raises:
            PeerError: a peer is gone or silent.
        """
        given = [(segment, parts[name]) for name, segment in zip(self.names, self.own, strict=True) if name in parts]
        if not given:
            return
        own = given[0][1].detach().new_zeros(self.layout.share)
        for segment, part in given:
            own[segment.offset : segment.offset + segment.length].copy_(part.detach())
        whole = own.new_empty(self.layout.length)
        group.all_gather(whole, own)
        self.num_sent_bytes += own.nbytes * (self.layout.num_ranks - 1)
        for name, tensor in zip(self.names, self._parts(whole), strict=True):
            if name in parts:
                yield name, tensor

    # ---- gradients -----------------------------------------------------------------------------------------------

    def take(self, position: int) -> None:
        """Copy the gradient of a parameter, complete on this rank, and free it unless the level keeps it.

        Raises:
            InputError: it is sparse.
        """
        parameter, name = self.parameters[position], self.names[position]
        check_gradient(name, parameter)
        assert parameter.grad is not None, "accumulated before"
        send, flat = self._buffer(), parameter.grad.reshape(-1)
        for row, segments in enumerate(self._rows):
            part = segments[position]
            if part.length:
                send[row, part.offset : part.offset + part.length].copy_(flat[part.first : part.end])
        send[:, self.layout.share + position] = 1
        if flat.numel():
            largest = self._largest[name] = torch.linalg.vector_norm(flat, torch.inf)
            send[:, self.layout.share + position] += 0 * largest  # NaN, and so is the sum, if it is not finite
        if not self._keeps_gradients:
            parameter.grad = None

    def exchange(self, group: RankGroup, *, is_marked: bool) -> None:
        """Sum the gradients of this rank's share over all ranks, in rank order.

        Args:
            group: the ranks that have shares.
            is_marked: this rank sets its mark.

        Raises:
            PeerError: a peer is gone or silent.
        """
        send, num_ranks = self._buffer(), self.layout.num_ranks
        keep_for_current_stream(send)  # it is forgotten here, before the stream has sent it
        self._send = None
        send[:, -1] = float(is_marked)
        received = torch.empty_like(send)
        width = send.shape[1]
        group.all_to_all(received.view(-1), send.view(-1), [width] * num_ranks, [width] * num_ranks)
        self.num_sent_bytes += (num_ranks - 1) * width * send.itemsize
        reduced = received[0]
        for contribution in received[1:]:
            reduced.add_(contribution)
        share = self.layout.share
        self._tail = reduced[share:].clone()
        self._sums = list(self._kept(reduced[:share]))

    def _kept(self, reduced: Tensor) -> Iterator[Tensor]:
        """Sums of the segments: in the gradients of the model if they are kept, else in a share of their own."""
        own = reduced if self._keeps_gradients else reduced.clone()
        for parameter, segment in zip(self.parameters, self.own, strict=True):
            part = own[segment.offset : segment.offset + segment.length]
            if self._keeps_gradients and parameter.grad is not None and parameter.grad.is_contiguous():
                place = parameter.grad.view(-1)[segment.first : segment.end]
                place.copy_(part)
                yield place
            else:
                yield part.clone() if self._keeps_gradients else part

    def land(self) -> None:
        """Give the segments their gradients. A parameter without a gradient on any rank keeps none."""
        flags: list[float] = []
        for position, (name, segment) in enumerate(zip(self.names, self.segments, strict=True)):
            if name not in self._largest:
                # Lazy: reading the flags synchronizes with the device, and a rank with all gradients does not.
                flags = flags or self._tail.tolist()
                if not flags[position]:
                    continue
            segment.grad = self._sums[position]

    def show(self, wanted: Container[str], group: RankGroup) -> None:
        """Give parameters the whole sums of their gradients, in `grad`, until `take_shown`. After `land`, by all ranks.

        Args:
            wanted: names of parameters.
            group: the ranks that have shares.

        Raises:
            PeerError: a peer is gone or silent.
        """
        for position, (name, segment) in enumerate(zip(self.names, self.segments, strict=True)):
            if name in wanted:
                own = segment.grad
                self.parameters[position].grad = None if own is None else self.joined(position, own, group)

    def take_shown(self, wanted: Container[str]) -> None:
        """Give the segments their parts of the gradients that parameters have in `grad` now, and free those."""
        for name, parameter, segment, place in zip(self.names, self.parameters, self.segments, self.own, strict=True):
            if name in wanted and parameter.grad is not None:
                segment.grad = parameter.grad.reshape(-1)[place.first : place.end].clone()
                parameter.grad = None

    def is_marked(self) -> bool:
        """Whether any rank has set its mark; after `exchange`. Synchronizes with the device."""
        return bool(self._tail[-1].item() > 0)

    def flags(self) -> Tensor:
        """Per parameter a number, finite if its gradients are so on all ranks; after `exchange`."""
        return self._tail[:-1]

    def pieces(self) -> Mapping[str, Piece]:
        """Place and whole shape of each segment in its parameter, by name."""
        return {
            name: Piece(first=segment.first, shape=tuple(parameter.shape))
            for name, parameter, segment in zip(self.names, self.parameters, self.own, strict=True)
        }

    def largest(self) -> Iterator[tuple[str, Tensor]]:
        """Name, and the largest magnitude of the gradient here (scalar), of each parameter that has one."""
        yield from self._largest.items()

    def clear(self) -> None:
        """Forget the gradients of a step."""
        for parameter in (*self.parameters, *self.segments):
            parameter.grad = None
        self._send, self._sums, self._largest = None, [], {}

    def _buffer(self) -> Tensor:
        """Per rank its share of the gradients here, one flag per parameter, and a mark."""
        if self._send is None:
            width = self.layout.share + len(self.parameters) + 1
            self._send = self._share.new_zeros(self.layout.num_ranks, width)
        return self._send
