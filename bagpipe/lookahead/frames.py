"""Frames between a training process and its planner process.

    to the planner     START spec, first batch │ BATCH ids │ END                        of a run
    from the planner   PLAN one rank's part, rank after rank │ MORE │ ERROR │ END       of the same run

A START ends the run before it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass

from bagpipe.client.codec import CodecError, decode_rank_batch, encode_rank_batch
from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.types.batch import Batch
from bagpipe.util.documents import parse_json

__all__ = ["FrameKind", "FramedPlan", "decode_error", "decode_spec", "encode_error", "encode_part", "encode_spec"]

#: Errors of the batches; a planner process ends with any other.
_ERRORS: Mapping[str, type[InputError]] = {error.__name__: error for error in (CapacityError, InputError)}


class FrameKind(enum.IntEnum):
    """Kinds of frames."""

    START = 1
    BATCH = 2
    END = 3
    PLAN = 4
    MORE = 5  # a batch is too large: send a window more, so that the error can name what that needs
    ERROR = 6


def encode_spec(spec: OracleSpec) -> bytes:
    """A spec as JSON."""
    return json.dumps(dataclasses.asdict(spec)).encode()


def decode_spec(data: bytearray) -> OracleSpec:
    """The spec in a frame."""
    fields = parse_json(data)
    fields["features"] = tuple(FeatureRef(**ref) for ref in fields["features"])
    return OracleSpec(**fields | {key: tuple(fields[key]) for key in ("table_rows", "example_shares")})


def encode_error(error: InputError) -> bytes:
    """An error as JSON."""
    return json.dumps([type(error).__name__, str(error)]).encode()


def decode_error(data: bytearray) -> InputError:
    """The error in a frame. A subclass without a name here is an InputError.

    Raises:
        CodecError: the frame holds none.
    """
    try:
        name, message = parse_json(data)
        return _ERRORS.get(name, InputError)(message)
    except (ValueError, TypeError) as error:
        raise CodecError(f"malformed error: {error}") from None


def encode_part(part: RankBatch) -> list[bytes | memoryview]:
    """A rank's part, its batch left out, as pieces to join. The part's own batch must be an `empty_batch`."""
    return encode_rank_batch(part)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FramedPlan:
    """The plan of a global batch.

    Attributes:
        parts: by rank, what `encode_part` made.
    """

    parts: tuple[bytearray, ...]

    def part(self, rank: int, batch: Batch) -> RankBatch:
        """A rank's part, with the rank's own batch. Its arrays are views of the frame."""
        return dataclasses.replace(decode_rank_batch(self.parts[rank]), batch=batch)

    def frame(self, rank: int) -> list[bytearray]:
        """See `GlobalPlan`."""
        return [self.parts[rank]]
