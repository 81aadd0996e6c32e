"""State of a job besides rows and dense weights: what goes on in the next job, and what begins anew. Pure.

    source's checkpoint: part.<part>.<name>, rng.<name>, counters of Part.progress ──each has a _Kind──┐
    settings of both jobs, parts of the new one ──────────────────────────────────────────match_job────┴──> JobPlan,
                                                                                                            Takings
A part that keeps state in checkpoints has a kind here. State without one is refused: it would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bagpipe.checkpoint.dense_state import MODEL, OPTIM, PART, RNG, DenseState, type_name
from bagpipe.errors import InputError
from bagpipe.start_from.dense import AVERAGE, DensePlan
from bagpipe.start_from.job_plan import EARLIER_ROWS, JobPlan
from bagpipe.start_from.job_settings import counts_uses, expires, is_staged
from bagpipe.start_from.source import Source
from bagpipe.start_from.tables import TablePlan
from bagpipe.start_from.takings import Fate, Taking, matches

__all__ = ["StateOfJob", "match_job"]

#: Beginnings of the keys that make a schedule.
_SCHEDULES = ("optim.schedule", "optim.warmup", "optim.rows_schedule", "optim.rows_warmup")
#: Keys that make a loss scale.
_SCALES = ("run.autocast", "run.loss_scale", "run.loss_scale_growth_interval")
#: Keys of the seed of random numbers, in the training program and in `TrainPipeline`.
_SEEDS = ("run.seed", "seed")
#: Beginning of the keys that divide the dense part into stages, and those of them that change no number.
_STAGES, _FREE = "pipeline.", ("pipeline.recompute", "pipeline.recompute_share")
#: Parts with tensors beside the dense weights. The dense part itself keeps versions of weights.
_KFAC, _VERSIONS, _OPTIMIZER = "kfac", "dense", "optimizer"
#: Counters of `Part.progress` that describe a checkpoint.
_OF_CHECKPOINT = ("steps", "dense")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateOfJob:
    """What the new job's state depends on.

    Attributes:
        settings: that affect its results, by name.
        seed: of its initial rows.
        world_size: its number of ranks.
        parts: names of its parts that keep state -> the tensors that this rank has of it at first, by name.
        trainable: its trainable parameters, by name.
    """

    settings: Mapping[str, Any]
    seed: int
    world_size: int
    parts: Mapping[str, Mapping[str, Tensor]]
    trainable: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Both:
    """Both jobs.

    Attributes:
        source, dense, ours: what is taken from, its dense part, and the new job.
        taken_weights, taken_states: names of the parameters that are taken, and of those whose optimizer state is.
        tables: that are taken.
        taken: names of the kinds that go on, of those before.
    """

    source: Source
    dense: DenseState
    ours: StateOfJob
    taken_weights: frozenset[str]
    taken_states: frozenset[str]
    tables: Sequence[TablePlan]
    taken: set[str] = field(default_factory=set)

    def has(self, part: str) -> bool:
        """The source has tensors of a part."""
        return any(name.startswith(f"{PART}{part}.") for name in self.dense.tensors)

    def counter(self, name: str) -> Any:
        """A counter of the source; None: it has none."""
        return self.source.counts.progress.get(name)

    def difference(self, keys: Sequence[str]) -> str:
        """The first key with two values, as text; empty if there is none."""
        theirs, ours = self.source.settings, self.ours.settings
        for key in keys:
            if key in theirs and key in ours and theirs[key] != ours[key]:
                return f"{key} {ours[key]}, was {theirs[key]}"
        return ""

    def difference_below(self, *beginnings: str) -> str:
        """The same of all keys with some beginnings."""
        keys = {*self.source.settings, *self.ours.settings}.difference(_FREE)
        return self.difference(sorted(key for key in keys if key.startswith(beginnings)))

    def weights_problem(self) -> str:
        """The first trainable parameter that is not taken as it was, as text; empty if there is none."""
        for name, target in self.ours.trainable.items():
            if name not in self.taken_weights:
                return f"{name} is not taken"
            if self.dense.tensors[MODEL + name].dtype != target.dtype:
                return f"{name} is {type_name(self.dense.tensors[MODEL + name])} there, {type_name(target)} here"
        return ""

    def tensors_problem(self, part: str) -> str:
        """The first tensor of a part that this rank needs and the source does not have, as text."""
        for name, target in self.ours.parts.get(part, {}).items():
            found = self.dense.tensors.get(f"{PART}{part}.{name}")
            if found is None or found.shape != target.shape:
                shape = "not there" if found is None else f"{list(found.shape)} there, {list(target.shape)} here"
                return f"{name} is {shape}"
        return ""


#: The fate of a kind, and its reason; None: neither job has it.
_Decision = tuple[Fate, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One kind of state.

    Attributes:
        name: in `Taking`, and behind ``job.`` in `checkpoint.start_without`.
        decide: what becomes of it.
        counters: of `Part.progress` that belong to it.
        part: name of the part whose tensors belong to it; empty: it has none.
        is_fact: it follows from other things: nothing is copied, and it cannot be left out.
    """

    name: str
    decide: Callable[[_Both], _Decision]
    counters: tuple[str, ...] = ()
    part: str = ""
    is_fact: bool = False


def match_job(
    source: Source,
    theirs: DenseState,
    ours: StateOfJob,
    dense: DensePlan,
    tables: Sequence[TablePlan],
    without: Sequence[str],
) -> tuple[JobPlan, list[Taking]]:
    """Compare the state of both jobs.

    Args:
        source: what is taken from.
        theirs: its dense part; names, shapes and dtypes are read.
        ours: of the new job.
        dense: what is taken of the dense part.
        tables: the tables that are taken.
        without: see `checkpoint.start_without`.

    Raises:
        InputError: the source has state of which nobody knows what becomes.
    """
    if not source.checkpoint_id:
        return JobPlan(), []
    _check_known(source, theirs)
    both = _Both(
        source=source,
        dense=theirs,
        ours=ours,
        taken_weights=dense.weights,
        taken_states=dense.states,
        tables=tables,
    )
    items: list[Taking] = []
    for kind in _KINDS:
        decision = kind.decide(both)
        if decision is None:
            continue
        fate, detail = decision
        if fate is Fate.TAKEN and not kind.is_fact and matches(f"job.{kind.name}", without):
            fate, detail = Fate.NEW, "left out (checkpoint.start_without)"
        items.append(Taking(kind="job", name=kind.name, fate=fate, detail=detail))
        if fate is Fate.TAKEN:
            both.taken.add(kind.name)
    taken = [kind for kind in _KINDS if kind.name in both.taken]
    counts, turns = source.counts, {"kfac", "versions", "rotation"}
    plan = JobPlan(
        schedule_step=counts.schedule if "schedule" in both.taken else 0,
        dense_step=counts.dense if turns & both.taken else 0,
        masks_step=counts.masks if "random" in both.taken else 0,
        takes_random="random" in both.taken,
        progress={key: counts.progress[key] for kind in taken for key in kind.counters if key in counts.progress},
        parts=frozenset(kind.part for kind in taken if kind.part and not kind.is_fact),
        table_numbers=_table_numbers(both),
    )
    return plan, items


def _check_known(source: Source, theirs: DenseState) -> None:
    """Raise InputError for state without a kind."""
    parts = tuple(f"{PART}{kind.part}." for kind in _KINDS if kind.part)
    known = (MODEL, OPTIM, RNG, AVERAGE, *parts)
    counters = {*_OF_CHECKPOINT, *(key for kind in _KINDS for key in kind.counters)}
    names = (*theirs.tensors, *theirs.values, *theirs.pieces)
    unknown = [name for name in names if not name.startswith(known)]
    unknown += [name for name in source.counts.progress if name not in counters]
    if unknown:
        raise InputError(
            f"{source.label} has state {unknown[0]!r}, which this version can neither take over nor leave out: "
            "expected state that an earlier version or this one has made"
        )


def _table_numbers(both: _Both) -> dict[int, int]:
    numbers = {name: number for number, name in enumerate(both.source.tables)}
    names = {id(table): name for name, table in both.source.tables.items()}
    return {numbers[names[id(plan.source)]]: plan.number for plan in both.tables}


def _either(problem: str, detail: str) -> _Decision:
    return (Fate.NEW, problem) if problem else (Fate.TAKEN, detail)


def _schedule(both: _Both) -> _Decision:
    position = both.source.counts.schedule
    detail = f"learning rates go on at step {position}"
    if both.ours.settings.get("optim.schedule_unit") == "epoch":
        detail = f"the warm-up goes on at step {position}, epochs count from 0"
    return _either(both.difference_below(*_SCHEDULES), detail)


def _plateau(both: _Both) -> _Decision:
    theirs, ours = both.counter("plateau"), "plateau" in both.ours.parts
    if theirs is None or not ours:
        text = "the factor begins at 1" if ours else "this job's rates follow no evaluations"
        return None if theirs is None and not ours else (Fate.NEW if ours else Fate.DROPPED, text)
    problem = "" if "schedule" in both.taken else "its schedule begins anew"
    return _either(problem, "factor, and evaluations without improvement")


def _loss_scale(both: _Both) -> _Decision:
    scale = both.counter("loss_scale")
    return None if scale is None else _either(both.difference(_SCALES), f"goes on at {scale}")


def _random(both: _Both) -> _Decision:
    problem = both.difference(_SEEDS)
    if not problem and both.source.world_size != both.ours.world_size:
        problem = f"{both.ours.world_size} ranks, were {both.source.world_size}"
    detail = "states of the random number generators"
    if is_staged(both.source.settings) or is_staged(both.ours.settings):
        problem = problem or both.difference_below(_STAGES)
        detail += f", those of the stages at batch {both.source.counts.masks}"
    return _either(problem, detail)


def _unseen_rows(both: _Both) -> _Decision:
    theirs, ours = both.source.seed, both.ours.seed
    if theirs is None:
        return None
    problem = "" if theirs == ours else f"seed {ours}, was {theirs}"
    return _either(problem, f"rows that are not there begin as they would in that job: seed {ours}")


def _kfac(both: _Both) -> _Decision:
    theirs, ours = both.has(_KFAC), _KFAC in both.ours.parts
    if not theirs or not ours:
        text = "factors begin anew: not there" if ours else "this job does not precondition"
        return None if not theirs and not ours else (Fate.NEW if ours else Fate.DROPPED, text)
    problem = both.difference(("optim.kfac_lag",)) or both.weights_problem() or both.tensors_problem(_KFAC)
    return _either(problem, f"factors and inverses, at batch {both.source.counts.dense}")


def _optimizer(both: _Both) -> _Decision:
    if not both.has(_OPTIMIZER):
        return None
    missing = sorted(both.dense.optimizer_states().keys() - both.taken_states)
    problem = both.weights_problem() or (f"the state of {missing[0]} is not taken" if missing else "")
    return _either(problem or both.difference(("optimizer",)), "its whole state_dict, rates and settings included")


def _versions(both: _Both) -> _Decision:
    theirs, ours = both.has(_VERSIONS), bool(both.ours.parts.get(_VERSIONS))
    problem = both.difference_below(_STAGES)
    if not theirs and not ours:
        return None
    if problem and not ours:
        return Fate.DROPPED, problem
    problem = problem or both.weights_problem() or both.tensors_problem(_VERSIONS)
    if problem:
        return Fate.NEW, f"all versions of the weights begin as the weights: {problem}"
    return Fate.TAKEN, f"weights of earlier batches, at batch {both.source.counts.dense}"


def _rotation(both: _Both) -> _Decision:
    key = "pipeline.backward_shares"
    if not both.source.settings.get(key) and not both.ours.settings.get(key):
        return None
    problem = both.difference_below(_STAGES) or both.difference(_SEEDS)
    if not problem and both.source.world_size != both.ours.world_size:
        problem = f"{both.ours.world_size} ranks, were {both.source.world_size}"
    return _either(problem, f"partial backwards go on at batch {both.source.counts.dense}")


def _earlier_rows(both: _Both) -> _Decision:
    if not both.has(EARLIER_ROWS):
        return None
    if EARLIER_ROWS not in both.ours.parts:
        return Fate.DROPPED, "the first batch reads rows as of the last update"
    known = _table_numbers(both)
    left_out = [name for number, name in enumerate(both.source.tables) if number not in known]
    problem = both.difference_below(_STAGES) or (f"rows of {left_out[0]} are not taken" if left_out else "")
    return _either(problem, "rows of the first batch as they were before the last update")


def _decay(both: _Both) -> _Decision:
    if not both.has("decay"):
        return None
    return Fate.TAKEN, "rows have what they missed; those that are not there have not decayed"


def _follows(name: str, is_used: Callable[[Mapping[str, Any]], bool], detail: str) -> Callable[[_Both], _Decision]:
    """Rule of what the cacher knows of rows, which no checkpoint has."""

    def decide(both: _Both) -> _Decision:
        if is_used(both.ours.settings):
            return Fate.NEW, detail
        return (Fate.DROPPED, f"this job has no {name}") if is_used(both.source.settings) else None

    return decide


def _anew(counter: str, detail: str) -> Callable[[_Both], _Decision]:
    """Rule of what begins anew in every job."""
    return lambda both: None if both.counter(counter) is None else (Fate.NEW, detail)


#: In the order in which they are decided and listed.
_KINDS = (
    _Kind(name="schedule", decide=_schedule),
    _Kind(name="plateau", decide=_plateau, counters=("plateau",)),
    _Kind(name="loss_scale", decide=_loss_scale, counters=("loss_scale", "finite_steps")),
    _Kind(name="random", decide=_random),
    _Kind(name="unseen rows", decide=_unseen_rows, is_fact=True),
    _Kind(name="kfac", decide=_kfac, part=_KFAC),
    _Kind(name="optimizer", decide=_optimizer, part=_OPTIMIZER),
    _Kind(name="versions", decide=_versions, part=_VERSIONS),
    _Kind(name="rotation", decide=_rotation),
    _Kind(name="earlier_rows", decide=_earlier_rows, part=EARLIER_ROWS),
    _Kind(name="decay", decide=_decay, part="decay", is_fact=True),
    _Kind(
        name="uses",
        decide=_follows("data.min_uses", counts_uses, "rows that are there are admitted, uses of others count from 0"),
    ),
    _Kind(
        name="ages",
        decide=_follows("data.expire_after", expires, "rows that are there are as old as this job"),
    ),
    _Kind(
        name="totals",
        decide=_anew("samples", "steps, examples and losses count from 0"),
        counters=("samples", "skipped_batches", "loss_sum", "loss_sums"),
    ),
    _Kind(
        name="data",
        decide=_anew("reader_state", "this job's data, from its first example on"),
        counters=("reader_state",),
    ),
    _Kind(
        name="evaluations",
        decide=_anew("evaluations", "evaluations, the best one and eval.patience count from 0"),
        counters=("evaluations",),
    ),
    _Kind(
        name="user_state",
        decide=_anew("user_state", "position of the loader, settings of the optimizer's groups, tracked objects"),
        counters=("user_state",),
    ),
)
