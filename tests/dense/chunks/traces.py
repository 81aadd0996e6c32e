"""Random traces, and an exhaustive search for the fewest fetches."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from random import Random

from bagpipe.dense.chunks.moments import Moment, Trace, Use

__all__ = ["fewest_fetches", "layers_trace", "random_trace"]


def random_trace(seed: int, *, creates: bool = True) -> tuple[Trace, int]:
    """A trace and a number of slots that it fits."""
    random = Random(seed)
    num_chunks, length = random.randint(2, 6), random.randint(2, 9)
    moments = []
    for number in range(length):
        chosen = random.sample(range(num_chunks), random.randint(1, min(3, num_chunks)))
        reads = [not creates or random.random() < 0.8 for _ in chosen]
        uses = [Use(chunk, r, not r or random.random() < 0.5) for chunk, r in zip(chosen, reads, strict=True)]
        moments.append(Moment(f"moment {number}", tuple(uses)))
    least = max(len(moment.uses) for moment in moments)
    return moments, random.randint(least, max(least, num_chunks - 1))


def layers_trace(num_layers: int) -> Trace:
    """Forward, backward and step of layers with a chunk each of weights, gradients and state."""
    weights, gradients, state = (range(kind * num_layers, (kind + 1) * num_layers) for kind in range(3))
    return [
        *(Moment(f"forward {n}", (Use(weights[n]),)) for n in range(num_layers)),
        *(
            moment
            for n in reversed(range(num_layers))
            for moment in (
                Moment(f"backward {n}", (Use(weights[n]),)),
                Moment(f"gradient {n}", (Use(gradients[n], reads=False, writes=True),)),
            )
        ),
        *(
            Moment(f"step {n}", (Use(weights[n], writes=True), Use(gradients[n]), Use(state[n], writes=True)))
            for n in range(num_layers)
        ),
    ]


def fewest_fetches(trace: Trace, num_slots: int, num_batches: int) -> int:
    """The fewest copies to an empty device that let a trace run so often, by trying every choice of what stays."""
    moments = list(trace) * num_batches

    @cache
    def least(number: int, held: frozenset[int]) -> int:
        if number == len(moments):
            return 0
        uses = moments[number].uses
        used = frozenset(use.chunk for use in uses)
        cost = sum(use.reads and use.chunk not in held for use in uses)
        others = held - used
        room = num_slots - len(used)
        kept = [frozenset(some) for some in combinations(sorted(others), min(room, len(others)))]
        return cost + min(least(number + 1, used | some) for some in kept)

    return least(0, frozenset())
