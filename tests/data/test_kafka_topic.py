"""A topic over the real protocol: the batches of a file of its messages, whatever came when, wherever a job resumes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.formats import open_source
from data.kafka_topic import parse_url
from data.loader import open_loader
from data.testing import assert_same_batches, check_resume, read_all
from tests.data.brokers import PARTITIONS, Broker, broker
from tests.data.files import criteo_line, criteo_lines

RUN = 4
LINES = criteo_lines(200).splitlines()
SCHEMA = """
label = "click"
dense = ["price"]
sparse = ["item"]
[csv]
columns = ["click", "price", "item"]
"""


@pytest.fixture(scope="module")
def kafka() -> Iterator[Broker]:
    with broker() as found:
        yield found


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of this test."""
    return "".join(letter if letter.isalnum() else "_" for letter in request.node.name)


def config(url: str, **changes: Any) -> DataConfig:
    given: dict[str, Any] = {
        "path": url,
        "format": "criteo-tsv",
        "batch_size": 16,
        "eval_fraction": 0.0,
        "workers": 0,
        "kafka_run": RUN,
        "stream_wait_s": 0.02,
        "stream_idle_s": 0.05,
    }
    return DataConfig(**{**given, **changes})


def in_turns(messages: list[list[bytes]], run: int = RUN) -> list[bytes]:
    """The messages of the partitions in the order in which they are read, if none follows."""
    rounds = max(len(each) for each in messages) // run + 1
    return [line for number in range(rounds) for each in messages for line in each[number * run : (number + 1) * run]]


def plain(lines: list[bytes], folder: Path, **changes: Any) -> list[Batch]:
    (folder / "lines").write_bytes(b"".join(line + b"\n" for line in lines))
    return read_all(open_loader(config(str(folder / "lines"), stream_idle_s=0.0, **changes), seed=0))


def test_every_position_resumes(kafka: Broker, topic: str, tmp_path: Path) -> None:
    shares = [LINES[:30], LINES[30:41], [], LINES[41:60]]
    for partition, lines in enumerate(shares):
        kafka.send(partition, lines, topic)
    job = config(kafka.url(topic))
    batches = check_resume(lambda state: open_loader(job, seed=0, state=state))
    assert_same_batches(batches, plain(in_turns(shares), tmp_path))


def test_batches_do_not_depend_on_when_messages_came(kafka: Broker, topic: str, tmp_path: Path) -> None:
    """Turn by turn, with a loader that is closed and resumed in between; then the last, incomplete turns."""
    shares = [LINES[number::PARTITIONS] for number in range(PARTITIONS)]
    job = config(kafka.url(topic), stream_idle_s=0.0)
    kafka.send(0, shares[0][:10], topic)
    got: list[Batch] = []
    state: dict[str, Any] | None = None
    for part in range(5):
        with open_loader(job, seed=0, state=state) as loader:
            for partition in (3, 1, 0, 2):
                first = 10 if partition == 0 and not part else 10 * part
                kafka.send(partition, shares[partition][first : 10 * part + 10], topic)
            got += [next(loader) for _ in range(2)]
            state = json.loads(json.dumps(loader.state()))
    got += read_all(open_loader(dataclasses.replace(job, stream_idle_s=0.05), seed=0, state=state))
    assert_same_batches(got, plain(in_turns(shares), tmp_path))


def test_a_stream_that_ended_goes_on_where_its_partitions_ended(kafka: Broker, topic: str, tmp_path: Path) -> None:
    """No message is lost or read twice: the turns are counted anew from there."""
    job = config(kafka.url(topic), batch_size=1)
    numbered = [criteo_line(dense=str(number)) for number in range(60)]
    kafka.send(0, numbered[:6], topic)
    kafka.send(2, numbered[6:9], topic)
    read: list[Batch] = []
    state: dict[str, Any] | None = None
    for more in ([], numbered[9:40], numbered[40:60]):
        kafka.send(2, more, topic)
        with open_loader(job, seed=0, state=state) as loader:
            read += loader
            state = json.loads(json.dumps(loader.state()))
    expected = [numbered[number] for number in (*range(4), *range(6, 9), 4, 5, *range(9, 60))]
    assert_same_batches(read, plain(expected, tmp_path, batch_size=1))


def test_a_time_that_has_passed_ends_it(kafka: Broker, topic: str, tmp_path: Path) -> None:
    kafka.send(1, LINES[:5], topic)
    job = config(kafka.url(topic), stream_idle_s=0.0, until="2000-01-01")
    # This broker knows no times: what is there counts as earlier.
    assert_same_batches(read_all(open_loader(job, seed=0)), plain(LINES[:5], tmp_path))


def test_lines_of_csv_in_worker_processes(kafka: Broker, topic: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text(SCHEMA)
    lines = [b"%d,%d,%d" % (number % 2, number, number * 7) for number in range(20)]
    kafka.send(3, lines, topic)
    form: dict[str, Any] = {"format": "csv", "schema": str(schema), "workers": 1}
    batches = read_all(open_loader(config(kafka.url(topic), **form), seed=0))
    assert_same_batches(batches, plain(lines, tmp_path, **form))
    schema.write_text(SCHEMA.partition("[csv]")[0])
    with pytest.raises(InputError, match=r"schema.toml: messages have no header: csv.columns must name their columns"):
        open_source(config(kafka.url(topic), **form))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"1\t2", ", partition 1, offset 9: expected 40 tab-separated columns, got 2"),
        (None, ", partition 1, offset 9: expected 40 tab-separated columns, got 1"),
        (
            LINES[0] + b"\n" + LINES[1],
            ", partition 1, offset 9: expected a message of one line, got a line break in it",
        ),
    ],
)
def test_a_bad_message_is_named(message: bytes | None, reason: str, kafka: Broker, topic: str) -> None:
    kafka.send(1, [*LINES[:9], message, *LINES[9:12]], topic)
    job = config(kafka.url(topic), batch_size=4)
    with open_loader(job, seed=0) as loader:
        assert [next(loader).num_examples for _ in range(2)] == [4, 4]
        with pytest.raises(InputError) as refused:
            next(loader)
    assert str(refused.value) == kafka.url(topic) + reason
    if message is None or b"\n" not in message:
        skipping = dataclasses.replace(job, bad_rows="skip")
        assert sum(batch.num_examples for batch in read_all(open_loader(skipping, seed=0))) == 12


def test_a_topic_can_only_be_trained_on(kafka: Broker, topic: str) -> None:
    kafka.send(0, LINES[:1], topic)
    source = open_source(config(kafka.url(topic)))
    with pytest.raises(InputError, match="it can only be trained on"):
        source.segments()
    assert "password" not in repr(source)


@pytest.mark.parametrize(
    "url",
    [
        "kafka://",
        "kafka://host/clicks",
        "kafka://host:9092",
        "kafka://host:9092/a/b",
        "kafka://u:p@host:1/t",
        "kafka:x",
    ],
)
def test_addresses(url: str) -> None:
    with pytest.raises(InputError, match=r"data.path must be kafka://HOST:PORT\[,HOST:PORT\]/TOPIC, got kafka:"):
        parse_url(url)
    assert parse_url("kafka://a:1,b:2/clicks.v1") == ("a:1,b:2", "clicks.v1")


@pytest.mark.parametrize("user", ["user:SECRET", "SECRET", "user:SEC@RET/SECRET"])
def test_a_password_in_an_address_is_not_shown(user: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_url(f"kafka://{user}@host:9092/clicks")
    assert str(refused.value) == ("data.path must be kafka://HOST:PORT[,HOST:PORT]/TOPIC, got kafka://host:9092/clicks")


def test_without_the_client_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['confluent_kafka'] = None\n"
        "from bagpipe.config.sections import DataConfig\n"
        "from data.formats import open_source\n"
        "open_source(DataConfig(path='kafka://127.0.0.1:1/clicks', format='criteo-tsv'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "bagpipe.errors.InputError: kafka://127.0.0.1:1/clicks needs the Python package confluent-kafka, which is not "
        "installed: pip install confluent-kafka"
    )
