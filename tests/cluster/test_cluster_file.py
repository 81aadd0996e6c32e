from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bagpipe.cluster.cluster_file import PRESETS, from_toml, load_cluster, to_toml
from bagpipe.cluster.model import ObjectStorage
from bagpipe.errors import InputError
from tests.cluster.clusters import CARD, cluster, hosts


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_read_and_written(name: str) -> None:
    found = load_cluster(name)
    assert found.num_ranks > 1
    assert found.stores is not None
    assert found.cachers is not None
    assert from_toml(to_toml(found), source="x") == found


def test_a_cluster_is_read_back() -> None:
    mixed = cluster(hosts(2), hosts(1, "cpu", memory_bytes=1e9), object_storage=ObjectStorage(bytes_per_s=1e9))
    assert from_toml(to_toml(mixed), source="x") == mixed
    assert from_toml(to_toml(cluster(stores=None, cachers=None)), source="x").stores is None


def test_odd_names_and_infinities_are_read_back() -> None:
    devices = {"é 1": replace(CARD, flops={"float32": math.inf, "a b": 1.0}), "card": CARD}
    odd = cluster(hosts(1, "é 1", memory_bytes=math.inf), devices=devices, name="\U0001f600")
    assert from_toml(to_toml(odd), source="x") == odd


def test_a_file_and_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(to_toml(cluster()), encoding=encoding)
        assert load_cluster(str(path)) == cluster()
    with pytest.raises(InputError, match=r"cluster: cannot read .*gone\.toml: "):
        load_cluster(str(tmp_path / "gone.toml"))
    with pytest.raises(InputError, match=r"cluster: expected a \.toml file or one of commodity, .*, got 'mine'"):
        load_cluster("mine")


TEXT = to_toml(cluster())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "version = 2", "mine: version: expected 1"),
        ("version = 1", "version = ", "mine: not valid TOML: "),
        ("[stores]", "[store]", "mine: unknown field store"),
        ("servers = 2", "servers = 2.5", "mine: stores.servers: expected an integer, got '2.5'"),
        ("servers = 2", "", "mine: missing field stores.servers"),
        ('port = "net"', 'port = "wifi"', "mine: trainers[0].port: expected one of local, net, got 'wifi'"),
        ("bytes_per_s = 8000000000.0", "bytes_per_s = 0", "mine: links.local.bytes_per_s: expected a number above 0"),
        ("bytes_per_s = 8000000000.0", 'bytes_per_s = "fast"', "mine: links.local.bytes_per_s: expected a number, got"),
        ("flops = { float32", 'flops = { float16 = "many", float32', "mine: devices.cpu.flops.float16: expected a num"),
    ],
)
def test_bad_files_are_refused_in_one_line(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(InputError) as caught:
        from_toml(TEXT.replace(old, new, 1), source="mine")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_integers_are_numbers_too() -> None:
    assert from_toml(TEXT.replace("8000000000.0", "8000000000"), source="mine") == cluster()


def test_every_field_is_written() -> None:
    for field in dataclasses.fields(hosts()):
        assert f"{field.name} = " in TEXT
