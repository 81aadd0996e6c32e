"""`draw`: the job and the twins of (seed, number). Pure.

Stream(seed, number) ──values of space.JOB, group by group──> settings ──config_of──> accepted? else again
                     ──log that suits the model──> Log          ──twins──> Draw
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from bagpipe.config.model_rules import MODELS_OF_KEY
from bagpipe.schedule.registry import TRAINED_SCHEDULES
from bagpipe.types.schema import FROZEN
from bagpipe.util.failpoints import POINTS
from tests.harness.fuzz.draw import DIRECT, NOWHERE, Draw, Given, Kill, Twin, settings_of
from tests.harness.fuzz.log import Log
from tests.harness.fuzz.log_drawing import draw_log
from tests.harness.fuzz.space import JOB, MODEL, TWIN, Values, choices_of, config_of, draw_value, rules_beside

__all__ = ["STORES", "draw"]

#: Kinds of stores of the harness; jobs can also have their own.
STORES = ("memory", "server", "servers")

#: Factories beside the models by name.
FACTORIES: Values = {
    "tests.harness.fuzz.models:poisoned": 8,
    "tests.harness.fuzz.models:infinite": 4,
    "tests.system.factory:build": 3,
    "tests.system.factory:normalised": 2,
    "tests.system.staged_models:dropping": 2,
    "tests.system.staged_models:normalising": 2,
    "tests.system.staged_models:sequences": 2,
    "tests.system.staged_models:spare": 1,
    "tests.system.staged_models:tied": 1,
    "tests.system.staged_models:two_heads": 2,
}
#: Their weights where a bad batch ends the job.
_BAD: Values = {name: 0.7 for name in FACTORIES if name.startswith("tests.harness.fuzz.models")}
#: Models that cannot be cut into stages or micro-batches: mostly drawn whole.
_WHOLE = ("build", "normalised", "normalising", "sequences")
_ONE_STAGE = {
    "pipeline.schedule": "none",
    "pipeline.stages": "1",
    "pipeline.microbatches": "1",
    "pipeline.chunks": "0",
    "pipeline.costs": "",
    "pipeline.memory": "",
    "pipeline.prediction_offset": "0",
    "pipeline.in_flight": "0",
    "pipeline.replicas": "",
    "pipeline.rows_delay": "0",
    "pipeline.processes": "auto",
    "pipeline.backward_shares": "",
    "pipeline.backward_unit": "microbatch",
    "optim.kfac_lag": "0",
}
#: Settings of activations that are dropped together where the job does not allow them, in this order.
_ACTIVATIONS = (
    ("pipeline.activation_bytes",),
    ("pipeline.recompute_share", "pipeline.activation_bytes"),
    ("pipeline.activations",),
    ("pipeline.recompute",),
)
_ACTIVATION_DEFAULTS = {
    "pipeline.activation_bytes": "0",
    "pipeline.recompute_share": "",
    "pipeline.activations": "device",
    "pipeline.recompute": "false",
}
#: Formats whose examples have times.
_CLOCKED = ("avazu-csv", "movielens")
#: Values of ``checkpoint.start_without``.
_LEFT_BEHIND: Values = {"": 6, "state.*": 1, "job.schedule": 1, "job.random": 1}
_WORLD_SIZES: Mapping[int, float] = {1: 12, 2: 6, 4: 0.4}
_MAX_TRIES = 10_000


def draw(seed: int, number: int, *, stores: Sequence[str] = STORES, given: Given | None = None) -> Draw:
    """The draw of a seed and a number.

    Args:
        seed, number: decide everything that is not given.
        stores: kinds of stores of twins that can keep rows between starts.
        given: what is not drawn; a model by all of its keys.
    """
    stream = Stream(seed, number)
    fixed, of_twin = ({}, {}) if given is None else (dict(given.job), dict(given.twin))
    settings = {"eval.group": "some column", **fixed}
    for group in JOB:
        settings |= _accepted(stream, _without(group, fixed), settings)
    if settings["pipeline.replicas"]:
        settings["cacher.assign"] = "contiguous"  # needed where ranks read unequal shares
    own = {path: text for path, text in fixed.items() if path in ("model.name", "model.factory")}
    model = own or _model(stream("model"), settings)
    if "model.factory" not in model:
        keys = _without(_keys_of(model["model.name"], settings), fixed)
        model |= _accepted(stream, keys, {**settings, **model})
    if model.get("model.factory", "").rpartition(":")[2] in _WHOLE and stream("whole").random() < 0.95:
        settings |= _ONE_STAGE
    log = draw_log(stream("log"), settings, model)
    settings |= model | {"data.limit": str(stream("limit").choice([0, 0, 0, max(1, log.num_examples - 3)]))}
    settings["eval.group"] = log.columns[0].name if settings["eval.metric"] == "gauc" else ""
    if log.format not in _CLOCKED and settings["data.expire_unit"] == "days":
        settings["data.expire_unit"] = "steps"
    settings |= _follow(stream("follow"), log, settings) | _loss_weights(stream("loss weights"), model)
    settings |= _by_table(stream("by table"), log, settings)
    if stream("admitted").random() < 0.95:  # admission refuses that id, and zero vectors in a mean
        log = replace(log, least=-(2**63) + (settings["data.min_uses"] != "1" or "data.min_uses_by_table" in settings))
        if any(table.pooling == "mean" for table in log.tables):
            settings["data.default_row"] = "trained"
    world_size = _world_size(stream("world size"), settings) if given is None else given.world_size
    kills = _kills(stream("kills"), world_size, _num_batches(log, settings))
    twins = [
        DIRECT if given is None else replace(DIRECT, settings=(*DIRECT.settings, *given.direct)),
        _twin(stream, "cached", world_size, stores, job=settings, given=of_twin),
        _twin(stream, "resumed", world_size, stores, kills, job=settings, given=of_twin),
    ]
    before = _before(stream("before")) if given is None else None
    if before is not None:
        twins = [_after(twin) for twin in twins]
        settings["checkpoint.start_without"] = draw_value(stream("start without"), _LEFT_BEHIND)
    drawn = Draw(
        seed=seed,
        number=number,
        world_size=world_size,
        log=log,
        job=tuple(sorted(settings.items())),
        twins=tuple(twins),
        before=before,
    )
    for twin in (*drawn.twins, *filter(None, [before])):
        config_of(settings_of(drawn, twin, NOWHERE))
    return drawn


@dataclass(frozen=True, slots=True)
class Stream:
    """Random numbers of a draw by name, so that a new key changes the values of no other key."""

    seed: int
    number: int

    def __call__(self, name: str) -> Random:
        return Random(f"fuzz {self.seed} {self.number} {name}")


def _accepted(stream: Stream, group: Mapping[str, Values], before: Mapping[str, str]) -> dict[str, str]:
    """Values of a group that the rules accept beside the ones before, with defaults for other keys."""
    is_accepted = rules_beside(before)
    tables = [(path, stream(path), list(values), list(accumulate(values.values()))) for path, values in group.items()]
    for _ in range(_MAX_TRIES):
        if is_accepted(drawn := {path: rng.choices(names, cum_weights=sums)[0] for path, rng, names, sums in tables}):
            return drawn
    raise AssertionError(f"the rules refuse all of {', '.join(group)} beside {before}")


def _without(group: Mapping[str, Values], fixed: Mapping[str, str]) -> dict[str, Values]:
    """The values of a group's other keys."""
    return {path: values for path, values in group.items() if path not in fixed}


def _model(rng: Random, settings: Mapping[str, str]) -> dict[str, str]:
    name = rng.choice([name for name in choices_of("model.name") if name != "esmm"])  # it needs two labels
    skips = settings["run.nonfinite"] == "skip"
    factories = FACTORIES if skips else {**FACTORIES, **_BAD}
    is_own = rng.random() < (0.6 if skips else 0.3)
    return {"model.name": name} | ({"model.factory": draw_value(rng, factories)} if is_own else {})


def _keys_of(name: str, settings: Mapping[str, str]) -> dict[str, Values]:
    """Values of a model's own keys; micro-batches and rows that are read late exclude batch norm."""
    keys = {path: values for path, values in MODEL.items() if name in MODELS_OF_KEY[path.partition(".")[2]]}
    if (settings["pipeline.microbatches"], settings["pipeline.rows_delay"]) != (
        "1",
        "0",
    ) and "model.batch_norm" in keys:
        keys["model.batch_norm"] = {"false": 1}
    return keys


def _world_size(rng: Random, settings: Mapping[str, str]) -> int:
    """Mostly a number of ranks that the schedule can use."""
    world_size = rng.choices(list(_WORLD_SIZES), weights=list(_WORLD_SIZES.values()))[0]
    schedule = TRAINED_SCHEDULES.get(settings["pipeline.schedule"])
    if schedule is None or rng.random() < 0.05:
        return world_size
    if settings["pipeline.replicas"]:
        return sum(map(int, settings["pipeline.replicas"].split(",")))
    num_ranks = schedule.num_ranks(int(settings["pipeline.stages"]), int(settings["pipeline.chunks"]) or None)
    return world_size if world_size % num_ranks == 0 else 1


def _by_table(rng: Random, log: Log, settings: Mapping[str, str]) -> dict[str, str]:
    """Sometimes other values for a table: optimizer, rate, uses, age. Nothing where the rules refuse them."""
    names = [table.name for table in log.tables]
    values: Mapping[str, Sequence[str]] = {
        "optim.rows_by_table": (*choices_of("optim.rows"), FROZEN),
        "optim.rows_lr_by_table": ("0.05",),
        "data.min_uses_by_table": ("1", "2"),
        "data.expire_after_by_table": ("0", "5"),
    }
    drawn: dict[str, str] = {}
    for path, some in values.items():
        one = {path: f"{rng.choice(names)}={rng.choice(some)}"}
        if rng.random() < 0.2 and rules_beside(settings)(drawn | one):
            drawn |= one
    return drawn


def _follow(rng: Random, log: Log, settings: Mapping[str, str]) -> dict[str, str]:
    """Sometimes a folder of files is read as one that grows; nothing where the rules refuse it."""
    wait_s, is_read = rng.choice(["0.05", "1"]), log.shape == "folder" and rng.random() < 0.8
    drawn = {"data.follow": "age", "data.follow_age_s": "0", "data.stream_idle_s": "0.5", "data.stream_wait_s": wait_s}
    data = {"data.path": NOWHERE.data["data.path"], "data.format": log.format}
    return drawn if is_read and rules_beside(settings)({**drawn, **data}) else {}


def _before(rng: Random) -> Twin | None:
    """Sometimes a job whose checkpoint the twins start from: the same one, ended early."""
    if rng.random() < 0.85:
        return None
    return Twin(name="before", settings=(("run.steps", str(rng.randint(1, 8))),), has_checkpoints=True)


def _after(twin: Twin) -> Twin:
    """The twin as one that starts from another job: it has checkpoints, and trains on no rows without them."""
    settings = {**dict(twin.settings), "store.existing": "reset"}
    return replace(twin, has_checkpoints=True, settings=tuple(sorted(settings.items())))


def _loss_weights(rng: Random, model: Mapping[str, str]) -> dict[str, str]:
    is_weighted = model.get("model.factory", "").endswith(":two_heads") and rng.random() < 0.5
    return {"model.loss_weights": "2,0.5"} if is_weighted else {}


def _num_batches(log: Log, settings: Mapping[str, str]) -> int:
    """Training batches, about."""
    num_examples = log.num_examples * (1 - float(settings["data.eval_fraction"]))
    batches = int(settings["data.epochs"]) * -(-num_examples // int(settings["data.batch_size"]))
    return max(1, min(int(batches), int(settings["run.steps"]) or int(batches)))


def _twin(
    stream: Stream,
    name: str,
    world_size: int,
    stores: Sequence[str],
    kills: tuple[Kill, ...] = (),
    *,
    job: Mapping[str, str],
    given: Mapping[str, str],
) -> Twin:
    """A twin; with checkpoints if it is killed."""
    rng = stream(name)
    settings = {path: draw_value(stream(f"{name} {path}"), values) for path, values in TWIN.items()}
    settings |= given
    is_followed = job["eval.patience"] != "0" or "plateau" in (job["optim.schedule"], job["optim.rows_schedule"])
    if not is_followed and rng.random() < 0.3:
        settings |= {"eval.every": "0", "eval.unit": "step"}  # training is the same without evaluations
    if {**job, **settings}["eval.every"] == "0":
        settings["eval.keep_best"] = "false"
    if settings["store.existing"] == "rows-only" and not rules_beside(job)({"store.existing": "rows-only"}):
        settings["store.existing"] = "reset"
    if job["optim.rows_weight_decay"] != "0" and settings["store.existing"] == "rows-only":
        settings["store.existing"] = "reset"  # decaying rows of another job are refused
    if settings["oracle.policy"] == "drop-unused":
        settings["oracle.horizon"] = "window"  # no idle row is kept, whose next use would be far
    settings |= {**_division(settings, job, world_size), **given}
    chunks = {path: settings[path] for path in TWIN if path.startswith("dense.")}
    # One process has both directions of such a schedule, whose stages two lanes use.
    schedule = TRAINED_SCHEDULES.get(job["pipeline.schedule"])
    is_whole = world_size == 1 or job["pipeline.processes"] == "1"
    is_shared = is_whole and schedule is not None and (schedule.num_pipes > 1 or bool(job["pipeline.replicas"]))
    if is_shared or not rules_beside(job)(chunks):
        settings |= {"dense.budget_bytes": "0", "dense.chunk_bytes": "0", "dense.state": "device", **given}
    for paths in _ACTIVATIONS:
        drawn = {path: settings[path] for path in TWIN if path.startswith(("dense.", "pipeline."))}
        if not rules_beside(job)(drawn):
            settings |= {**{path: _ACTIVATION_DEFAULTS[path] for path in paths}, **given}
    store = rng.choice([*stores, "own", "own-durable"])
    if store == "memory" and world_size > 1:
        store = "server"
    if store == "memory":  # has no client
        settings["store.client"] = "thread"
    if store in ("servers", "cluster"):  # each server needs a bucket
        settings["store.buckets"] = str(max(4, int(settings["store.buckets"])))
    # The servers of the harness keep nothing; without a folder for its files, neither does a job's own.
    if store != "own-durable":
        settings["store.durability"] = "memory"
    return Twin(
        name=name,
        settings=tuple(sorted(settings.items())),
        share=rng.choices([0.0, rng.random() ** 2, 1.0, None], weights=[4, 4, 1, 1 if kills else 0])[0],
        store=store,
        cacher="own" if rng.random() < 0.1 else "daemon",
        has_checkpoints=bool(kills) or rng.random() < 0.3,
        kills=kills,
        again=bool(kills) and rng.random() < 0.3,
        traces=rng.random() < 0.1,
    )


def _division(settings: Mapping[str, str], job: Mapping[str, str], world_size: int) -> dict[str, str]:
    """The division of the dense part as drawn; none where ranks, stages or the model have none."""
    none = {"dense.shard": "none", "dense.wrap": ""}
    if settings["dense.shard"] == "none" or world_size == 1:
        return none
    schedule = TRAINED_SCHEDULES.get(job["pipeline.schedule"])
    if job["pipeline.replicas"] and "2" not in job["pipeline.replicas"]:
        return none
    if schedule is not None and not job["pipeline.replicas"]:
        num_ranks = schedule.num_ranks(int(job["pipeline.stages"]), int(job["pipeline.chunks"]) or None)
        if world_size // num_ranks * schedule.num_pipes < 2:
            return none
    if job["optim.dense"] == "lamb" or (job["optim.clip_norm"] != "0" and job["optim.clip_scope"] != "rows"):
        return none  # norms of shares are sums of squares, of whole tensors norms: the last bit can differ
    refused = job.get("model.factory", "").rpartition(":")[2] in (*_WHOLE, "tied")
    if refused or job.get("model.batch_norm") == "true":
        return none
    whole = {"dense.budget_bytes": "0", "dense.chunk_bytes": "0", "dense.state": "device"}
    drawn = {path: settings[path] for path in none}
    return drawn if rules_beside(job)({**drawn, **whole}) else none


def _kills(rng: Random, world_size: int, num_batches: int) -> tuple[Kill, ...]:
    kills = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        is_interrupt = rng.random() < 0.2
        # A point of every batch; else any point, some of which a job may never reach.
        every_batch = is_interrupt or rng.random() < 0.6
        point = "after-fetch" if every_batch else rng.choice(POINTS)
        kills.append(
            Kill(
                point=point,
                times=rng.randint(1, num_batches) if point == "after-fetch" else rng.choice([1, 1, 1, 2, 4]),
                rank=rng.randrange(world_size),
                signal="SIGINT" if is_interrupt else "SIGKILL",
                spreads=rng.random() < 0.6,
            )
        )
    return tuple(kills)
