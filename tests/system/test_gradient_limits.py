"""Jobs with limits of gradients: equal to a plain loop with torch's, to direct mode, on ranks, in stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.effort import some_of
from tests.system.jobs import change, largest_batch, run_job
from tests.system.rank_threads import run_ranks
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_optim_settings import check

Clipped = Callable[[list[torch.nn.Parameter], list[torch.nn.Parameter]], object]
norm_, value_ = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
#: Keys, and the plain loop's call between backward and steps. Limits that some batches reach.
CLIPS: dict[str, tuple[dict[str, object], Clipped]] = {
    "dense": ({"clip_norm": 0.05}, lambda rows, dense: norm_(dense, 0.05)),
    "value": ({"clip_value": 0.003}, lambda rows, dense: value_(dense, 0.003)),
    "rows": ({"clip_norm": 0.005, "clip_scope": "rows"}, lambda rows, dense: norm_(rows, 0.005)),
    "all": ({"clip_norm": 0.05, "clip_scope": "all"}, lambda rows, dense: norm_([*rows, *dense], 0.05)),
}


@pytest.mark.parametrize(
    ("name", "schema"), some_of([*itertools.product(CLIPS, ["sum", "weighted and mean"])], {0, 3, 5, 6})
)
def test_limits_of_gradients_equal_torch_in_a_plain_loop(name: str, schema: str, clicks: MakeConfig) -> None:
    keys, clip = CLIPS[name]
    whole = change(clicks(schema, "dlrm", "rowwise_adagrad", limit=120), run__dtype="float64", optim__dense="sgd")
    config = change(whole, **{f"optim__{key}": value for key, value in keys.items()})
    norms: list[Any] = []
    limited = check(config, before_steps=lambda rows, dense: norms.append(clip(rows, dense)))
    assert limited.norms == pytest.approx([float(norm) for norm in norms if norm is not None], rel=1e-12)
    assert limited.digests != run_job(whole).digests


@pytest.mark.parametrize(("world_size", "scope"), some_of([(2, "all"), (2, "rows"), (3, "all")], {0, 1}))
def test_owners_of_rows_change_no_bit_of_a_limit(world_size: int, scope: str, clicks: MakeConfig) -> None:
    """Without a cache and with each lookahead other ranks own the rows, and gradients travel at other times."""
    config = change(clicks("mixed", limit=120), optim__clip_norm=0.001, optim__clip_scope=scope, run__dtype="float64")
    direct = run_ranks(change(config, cache__rows=0), world_size)
    for lookahead in (1, 6):
        cached = run_ranks(change(config, cache__rows=largest_batch(config), oracle__lookahead=lookahead), world_size)
        assert cached.digests == direct.digests
    whole = run_ranks(change(config, optim__clip_norm=0.0, optim__clip_scope="dense"), world_size)
    assert whole.digests != direct.digests


@pytest.mark.parametrize("scope", some_of(["dense", "all"], {1}))
def test_micro_batches_have_one_limit(scope: str, clicks: MakeConfig) -> None:
    config = change(clicks(limit=120), run__dtype="float64", optim__clip_norm=0.05, optim__clip_scope=scope)
    accumulated = change(config, pipeline__microbatches=3)
    whole, parts = run_job(config), run_job(accumulated)
    assert parts.norms == pytest.approx(whole.norms, rel=1e-12)
    assert_equal_numbers(run_staged(accumulated), run_staged(config))
    assert run_job(change(accumulated, cache__rows=0)).digests == parts.digests
    assert_equal_numbers(run_staged(accumulated, 2), run_staged(config))


def test_a_loss_scale_changes_no_limit(clicks: MakeConfig) -> None:
    config = change(clicks(limit=100), optim__clip_norm=0.05, optim__clip_scope="all")
    scaled = change(config, run__loss_scale=1024, run__nonfinite="skip")
    assert run_job(scaled).digests == run_job(config).digests


#: Schedules of each kind, and the ranks on which they run.
STAGED: dict[str, tuple[str, int, dict[str, object]]] = {
    "chain": ("1f1b", 2, {}),
    "free order": ("dynamic", 2, {}),
    "two pipes": ("chimera", 2, {}),
    "split backwards": ("zb-h1", 2, {}),
    "unlike replicas": ("1f1b", 3, {"pipeline__replicas": "2,1"}),
    "shares of the state": ("1f1b", 4, {"dense__shard": "optimizer"}),
    "shares of parameters": ("breadth-first", 4, {"dense__shard": "parameters"}),
    "versions": ("pipedream-2bw", 2, {}),
    "versions, rows a batch late": ("pipedream-2bw", 2, {"pipeline__rows_delay": 1}),
    "chunks": ("1f1b", 2, {"dense__state": "host"}),
}


@pytest.mark.parametrize(("kind", "scope"), some_of([*itertools.product(STAGED, ["dense", "all"])], set(range(20))))
def test_a_limit_of_the_norm_in_stages(kind: str, scope: str, clicks: MakeConfig) -> None:
    """The norm is that of all stages of all ranks, which is the norm that the whole model has."""
    schedule, world_size, keys = STAGED[kind]
    config = change(clicks(limit=120), run__dtype="float64", optim__clip_norm=0.05, optim__clip_scope=scope)
    config = change(config, optim__dense="adam")
    split = staged(config, schedule, 2, pipeline__microbatches=2, **keys)
    if "versions" not in kind:
        assert_equal_numbers(run_staged(split, world_size), run_staged(config))
    cached = run_staged(change(split, cache__rows=largest_batch(config)), world_size)
    assert run_staged(change(split, cache__rows=0), world_size).digests == cached.digests
    assert run_staged(change(split, optim__clip_norm=1e-3), world_size).digests != cached.digests


@pytest.mark.parametrize("keys", [*CLIPS])
def test_whether_batches_can_be_left_out_changes_no_limit(keys: str, clicks: MakeConfig) -> None:
    config = change(clicks("mixed", limit=60), **{f"optim__{key}": value for key, value in CLIPS[keys][0].items()})
    split = staged(config, "1f1b", 2, pipeline__microbatches=2)
    skipping = run_job(change(split, run__nonfinite="skip"))
    assert (skipping.digests, skipping.norms) == ((stops := run_job(split)).digests, stops.norms)


@pytest.mark.parametrize("world_size", [1, 2])
def test_limits_of_elements_in_stages(world_size: int, clicks: MakeConfig) -> None:
    config = change(clicks(limit=100), run__dtype="float64", optim__clip_value=0.003)
    assert_equal_numbers(run_staged(staged(config, "1f1b", 2), world_size), run_staged(config))
