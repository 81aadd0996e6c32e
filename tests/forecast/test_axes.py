from __future__ import annotations

from dataclasses import replace

import pytest

from bagpipe.errors import InputError
from bagpipe.forecast.axes import AXES, Case, scaled_ports, settings_of
from tests.cluster.clusters import cluster
from tests.forecast.jobs import TRAFFIC

CASE = Case(cluster=cluster(), traffic=TRAFFIC, ranks=1)
VALUES = {"policy": "direct", "bandwidth": 0.5, "schedule": "gpipe", "shard": "optimizer"}


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis.vary], ids=lambda axis: axis.name)
def test_a_varied_case_has_the_value(axis) -> None:
    value = VALUES.get(axis.name, 3)
    assert axis.read(axis.vary(replace(CASE, stages=2), value)) == value
    assert axis.flag.startswith("--")
    assert axis.help


def test_names_titles_and_flags_differ() -> None:
    for field in ("name", "title"):
        assert len({getattr(axis, field) for axis in AXES}) == len(AXES)
    flags = [axis.flag for axis in AXES if axis.flag]
    assert len(set(flags)) == len(flags)
    assert all(bool(axis.flag) == bool(axis.vary) for axis in AXES)


def test_settings_are_those_of_the_case() -> None:
    assert settings_of(CASE) == {
        "batch_examples": 1024,
        "lookahead": 32,
        "cache_rows": 20_000,
        "policy": "belady-window",
        "ranks": 1,
        "servers": 2,
        "cachers": 1,
        "bandwidth": 1.0,
        "stages": 1,
        "schedule": "none",
        "microbatches": 1,
        "shard": "none",
        "checkpoint_every": 0,
    }
    staged = settings_of(replace(CASE, stages=2))
    assert (staged["schedule"], staged["microbatches"]) == ("1f1b", 4)
    assert settings_of(replace(CASE, ranks=3, direct=True))["cache_rows"] == 0
    assert settings_of(replace(CASE, ranks=3))["cache_rows"] == 6_667
    without = settings_of(replace(CASE, cluster=cluster(stores=None, cachers=None)))
    assert (without["servers"], without["cachers"]) == (0, 0)


def test_ports_are_scaled_and_links_inside_hosts_are_not() -> None:
    links = scaled_ports(cluster(), 0.5).links
    assert links["net"].bytes_per_s == cluster().links["net"].bytes_per_s / 2
    assert links["local"] == cluster().links["local"]
    assert scaled_ports(cluster(), 1.0) == cluster()


@pytest.mark.parametrize(("name", "lacks"), [("servers", "stores"), ("cachers", "cachers")])
def test_what_is_varied_must_be_there(name: str, lacks: str) -> None:
    vary = next(axis.vary for axis in AXES if axis.name == name)
    assert vary is not None
    with pytest.raises(InputError, match=f"{lacks}: expected"):
        vary(replace(CASE, cluster=cluster(**{lacks: None})), 2)
