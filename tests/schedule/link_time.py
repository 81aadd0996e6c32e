"""`link_time`: a latency function for `simulate` from bandwidth and message sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program, overlapping_units, unit_counts, units_per_batch


def link_time(
    program: Program, batch_bytes: Mapping[tuple[int, int], float], *, bytes_per_time: float, latency: float = 0
) -> Callable[[Action, Action], float]:
    """Latency plus transfer time of the message between two actions, as a latency function for `simulate`.

    Links are not shared: transfers do not wait for each other.

    Args:
        program: the program; a message is the share of one of the sender's micro-batches.
        batch_bytes: (producer, consumer) -> bytes of a whole batch along that edge, the same for its gradient.
        bytes_per_time: bandwidth.
        latency: per transfer.

    Raises:
        ScheduleError: the bandwidth is not positive.
    """
    if not bytes_per_time > 0:
        raise ScheduleError(f"expected a bandwidth above 0, got {bytes_per_time}")
    counts = unit_counts(program.stages)

    def message_bytes(src: Action, dst: Action) -> float:
        """Bytes of the message from atom to atom; 0 if there is none."""
        forward = OPS[dst.op].role == "forward"
        edge = (src.stage, dst.stage) if forward else (dst.stage, src.stage)
        sends = src.op in ("F", "X_EMBED") if forward else src.op in ("B", "I") and dst.op in ("B", "I", "X_EMBED_GRAD")
        if not sends or edge not in batch_bytes or src.pipe != dst.pipe:
            return 0
        units, src_units = (units_per_batch(counts, (atom.stage, atom.op)) for atom in (dst, src))
        unit, src_unit = (dst.index or 0) % units, (src.index or 0) % src_units
        fits = src_unit in overlapping_units(unit, units, src_units)
        return batch_bytes[edge] / counts["micro"].get(src.stage, 1) if fits else 0

    def time(src: Action, dst: Action) -> float:
        return latency + sum(message_bytes(a, b) for a in src.atoms for b in dst.atoms) / bytes_per_time

    return time
