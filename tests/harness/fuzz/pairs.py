"""`PairArray`: the jobs of the pairwise array, in which every allowed pair of values of two axes occurs.

    axes.WEIGHTED, axes.problem ──cover──> rows ──given_of──> Given ──draw: all other keys, log, kills──> small Draw

The rules that the configuration alone decides are known before; whether data and model suit each other is not. So a
job has several draws of what its row leaves open, and the first that trains is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from tests.harness.fuzz.axes import RANKS, WEIGHTED, keys_of, problem
from tests.harness.fuzz.covering import Covering, Row, all_pairs, cover
from tests.harness.fuzz.draw import Draw, Given, Kill
from tests.harness.fuzz.drawing import STORES, draw
from tests.harness.fuzz.space import TWIN

__all__ = ["PairArray", "draw_of", "given_of", "pair_array"]

#: Draws of a job before it is wrong that none trains.
_MAX_DRAWS = 4
#: Between the numbers of a job's draws.
_STRIDE = 10_000
_NUM_BATCHES = 6
#: Of every job: small, whole, and trained to the end of its data.
_SMALL: Mapping[str, str] = {"data.epochs": "1", "run.steps": "0", "eval.patience": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairArray:
    """The array of a seed.

    Attributes:
        seed: of its rows, and of what they leave open.
        covering: its rows, and the pairs that no job has.
    """

    seed: int
    covering: Covering

    def __len__(self) -> int:
        return len(self.covering.rows)

    def draws(self, number: int, stores: Sequence[str] = STORES) -> Iterator[Draw]:
        """Draws of a job, of which the first that trains is to be taken."""
        for place in range(_MAX_DRAWS):
            yield draw_of(self.covering.rows[number], self.seed, number, place, stores)

    def lines(self) -> list[str]:
        """The refused pairs with their reasons, and the numbers of jobs and pairs."""
        why = self.covering.refused
        refused = [f"refused: {pair[0][1]} + {pair[1][1]}: {why[pair]}" for pair in all_pairs(WEIGHTED) if pair in why]
        count = len(all_pairs(WEIGHTED))
        head = f"{len(self)} jobs of seed {self.seed}: {count - len(refused)} of {count} pairs, {len(refused)} refused"
        return [*refused, head]


def pair_array(seed: int) -> PairArray:
    """The array. Takes about a second."""
    return PairArray(seed=seed, covering=cover(WEIGHTED, problem, seed=seed))


def given_of(row: Row) -> Given:
    """The keys of a row, of the job and of its twins.

    The direct twin has the whole dense part in its memory, so the row's other twins are compared with one that does
    without. A division is an exception: norms of whole tensors can differ from those of shares in the last bit.
    """
    keys = keys_of(row)
    job = {path: text for path, text in keys.items() if path not in TWIN}
    twin = {path: text for path, text in keys.items() if path in TWIN}
    if row["division"] != "undivided":
        job["model.batch_norm"] = "false"  # statistics of a batch have no shares
    if row["order"] != "whole" and row["processes"] == "of ranks" and row[RANKS] != "1":
        job["cacher.assign"] = "contiguous"  # a rank whose stages need no rows reads none
    has_norms = row["limit"] == "limit of the norm" or row["dense optimizer"] == "LAMB"
    needs_shares = row["division"] != "undivided" and has_norms
    return Given(
        job=tuple({**_SMALL, **job}.items()),
        twin=tuple(twin.items()),
        direct=(("dense.shard", "optimizer"),) if needs_shares else (),
        world_size=int(row[RANKS]),
    )


def draw_of(row: Row, seed: int, number: int, place: int = 0, stores: Sequence[str] = STORES) -> Draw:
    """A small job of a row.

    Args:
        row: its values.
        seed, number: of the job.
        place: among the draws of what the row leaves open.
        stores: kinds of stores of its twins.
    """
    rng = Random(f"pairs {seed} {number} {place}")
    given = given_of(row)
    batch_size = rng.choice([12, 16])
    job = {**dict(given.job), "data.batch_size": str(batch_size)}
    drawn = draw(seed, number + place * _STRIDE, stores=stores, given=replace(given, job=tuple(job.items())))
    log = replace(drawn.log, num_examples=batch_size * _NUM_BATCHES + rng.randrange(2, batch_size))
    job = {**dict(drawn.job), "data.limit": "0"}
    cached, resumed = drawn.twins[1:]
    kill = Kill(
        point="after-fetch",
        times=rng.randint(2, _NUM_BATCHES // 2),
        rank=rng.randrange(drawn.world_size),
        signal=rng.choice(["SIGKILL", "SIGKILL", "SIGINT"]),
        spreads=rng.random() < 0.6,
    )
    every = (("checkpoint.every", rng.choice(["1", "2"])),)
    resumed = replace(resumed, kills=(kill,), settings=tuple(sorted({**dict(resumed.settings), **dict(every)}.items())))
    return replace(
        drawn, number=number, log=log, job=tuple(sorted(job.items())), twins=(drawn.twins[0], cached, resumed)
    )
