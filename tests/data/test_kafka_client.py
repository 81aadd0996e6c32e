"""Settings of a client of a topic, and what it says where no broker or no topic is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from data import kafka_client
from data.kafka_client import Client, client_settings
from tests.data.brokers import broker


def test_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text("\ufeffsecurity.protocol = SASL_SSL\n\nsasl.password=a=b\n")
    assert client_settings("a:1", str(path)) == (
        ("bootstrap.servers", "a:1"),
        ("security.protocol", "SASL_SSL"),
        ("sasl.password", "a=b"),
    )
    path.write_text("security.protocol SSL\n")
    with pytest.raises(InputError, match=r"client.properties:1: expected NAME=VALUE, got a line without ="):
        client_settings("a:1", str(path))
    with pytest.raises(InputError, match=r"data.kafka_config: cannot read .*gone: "):
        client_settings("a:1", str(tmp_path / "gone"))


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(InputError, match=r'kafka://a:1/t: No such configuration property: "no\.such"'):
        Client("kafka://a:1/t", "t", (("no.such", "1"),))


def test_no_broker_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        Client("kafka://x/t", "t", client_settings(f"127.0.0.1:{port}", "")) as client,
        pytest.raises(InputError, match=r"kafka://x/t: no broker answered: .*Broker transport failure"),
    ):
        client.num_partitions()


def test_no_topic_is_one_line() -> None:
    with (
        broker() as found,
        Client("kafka://x/t", "t", client_settings(found.address, "")) as client,
        pytest.raises(InputError, match="kafka://x/t: no such topic: "),
    ):
        client.num_partitions()
