"""`shrink`: a simpler draw that is wrong too. Simplifications are tried in turn; those still wrong are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from bagpipe.config.keys import config_keys
from bagpipe.errors import InputError
from tests.harness.fuzz.draw import NOWHERE, Draw, Twin, settings_of
from tests.harness.fuzz.space import JOB, config_of

__all__ = ["shrink", "simplifications"]

#: The simplest value of every key of a job: its default, or a smaller one.
_SIMPLE = {key.path: str(key.default).lower() for key in config_keys()} | {
    "data.batch_size": "12",
    "data.eval_fraction": "0",
    "model.embedding_dim": "4",
    "model.bottom_mlp": "6",
    "model.top_mlp": "5",
}


def shrink(draw: Draw, is_wrong: Callable[[Draw], bool], *, max_trials: int = 30) -> Draw:
    """The simplest draw found.

    Args:
        draw: a wrong one.
        is_wrong: runs a draw.
        max_trials: most calls of `is_wrong`.
    """
    tried = 0
    for simplify in simplifications():
        simpler = simplify(draw)
        if simpler == draw or not _is_valid(simpler):
            continue
        if tried == max_trials:
            break
        tried += 1
        if is_wrong(simpler):
            draw = simpler
    return draw


def simplifications() -> Iterator[Callable[[Draw], Draw]]:
    """Functions that make a draw simpler, the most helpful ones first; each returns it unchanged where it cannot."""
    yield from (partial(_without_twin, name=name) for name in ("cached", "resumed"))
    yield _without_before
    yield _with_one_rank
    yield _with_shared_services
    for kept in range(3):
        yield partial(_with_kills, kept=kept)
    yield lambda draw: dataclasses.replace(draw, log=dataclasses.replace(draw.log, num_bad=0, extreme=0.0))
    for group in JOB:
        yield partial(_with_defaults, paths=tuple(group))
    yield from (partial(_with_defaults, paths=(path,)) for path in ("run.compile", "run.verify"))
    yield from (partial(_with_twins_without, section=section) for section in ("dense.", "pipeline."))
    # Together: a model refuses the keys of another one.
    model = tuple(path for path in _SIMPLE if path.startswith("model."))
    yield partial(_with_defaults, paths=(*model, "data.limit"))
    yield _with_plain_twins
    # What a setting of a twin needed before.
    yield from (partial(_with_defaults, paths=tuple(group)) for group in JOB)


def _without_twin(draw: Draw, name: str) -> Draw:
    if len(draw.twins) < 3:
        return draw
    return dataclasses.replace(draw, twins=tuple(twin for twin in draw.twins if twin.name != name))


def _without_before(draw: Draw) -> Draw:
    """The twins start anew."""
    job = tuple(pair for pair in draw.job if pair[0] != "checkpoint.start_without")
    return dataclasses.replace(draw, before=None, job=job)


def _with_one_rank(draw: Draw) -> Draw:
    twins = (
        dataclasses.replace(twin, kills=tuple(dataclasses.replace(kill, rank=0) for kill in twin.kills))
        for twin in draw.twins
    )
    return dataclasses.replace(draw, world_size=1, twins=tuple(twins))


def _with_shared_services(draw: Draw) -> Draw:
    """Every twin on the harness's server and daemon, started once and without a trace."""

    def change(twin: Twin) -> Twin:
        settings = tuple(pair for pair in twin.settings if pair[0] not in ("store.durability", "store.client"))
        return dataclasses.replace(twin, settings=settings, store="server", cacher="daemon", traces=False, again=False)

    return dataclasses.replace(draw, twins=(draw.twins[0], *map(change, draw.twins[1:])))


def _with_kills(draw: Draw, kept: int) -> Draw:
    twins = (dataclasses.replace(twin, kills=twin.kills[kept : kept + 1]) for twin in draw.twins)
    return draw if all(len(twin.kills) < 2 for twin in draw.twins) else dataclasses.replace(draw, twins=tuple(twins))


def _with_defaults(draw: Draw, paths: tuple[str, ...]) -> Draw:
    values = {path: _SIMPLE.get(path, value) for path, value in draw.job if path in paths}
    return dataclasses.replace(draw, job=tuple(sorted({**dict(draw.job), **values}.items())))


def _with_twins_without(draw: Draw, section: str) -> Draw:
    """The twins with the defaults of a section's keys."""
    twins = (
        dataclasses.replace(twin, settings=tuple(pair for pair in twin.settings if not pair[0].startswith(section)))
        for twin in draw.twins
    )
    return dataclasses.replace(draw, twins=tuple(twins))


def _with_plain_twins(draw: Draw) -> Draw:
    kept = ("checkpoint.every", "store.buckets", "oracle.lookahead")
    twins = (
        dataclasses.replace(twin, settings=tuple(pair for pair in twin.settings if pair[0] in kept))
        for twin in draw.twins
    )
    return dataclasses.replace(draw, twins=tuple(twins))


def _is_valid(draw: Draw) -> bool:
    try:
        for twin in draw.twins:
            config_of(settings_of(draw, twin, NOWHERE))
    except InputError:
        return False
    return True
