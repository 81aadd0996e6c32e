"""No text that can show a URL shows its password."""

from __future__ import annotations

import pytest

from bagpipe.client.address import parse_address
from bagpipe.client.link import Credentials
from bagpipe.config.load import CommandLine, parse_config
from bagpipe.config.sections import Config, StoreConfig
from bagpipe.errors import InputError
from bagpipe.store.open import open_store
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.urls import parse_cluster_url, parse_urls
from bagpipe.train_pipeline.options import Options
from bagpipe.types.schema import RowSchema, RowTable
from bagpipe.util.redaction import has_password, redact
from cacher.jobs import Job
from cacher.security import Access
from trainer.services import Services

PASSWORD = "Xk3-sesame"
URLS = (
    f"redis://user:{PASSWORD}@host:1",
    f"redis://us/er:{PASSWORD}@host",
    f"redis://a:1, rediss://user:{PASSWORD}@b:2",
    f"unix:///run/store.sock?db=2&password={PASSWORD}",
    f"redis+cluster://user:{PASSWORD}@a:1,b:2",
)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/1", "redis://host:6379/1"),
        ("redis://:secret@host", "redis://:***@host"),
        ("redis://user:secret@host:1", "redis://user:***@host:1"),
        ("redis://user:se%40cret@host:1", "redis://user:***@host:1"),
        ("rediss://user@host", "rediss://user@host"),
        ("unix:///tmp/s.sock?db=2&password=secret", "unix:///tmp/s.sock?db=2&password=***"),
        ("unix://u:secret@/tmp/s.sock", "unix://u:***@/tmp/s.sock"),
        ("redis://[u:a/b@c@host", "redis://[u:***@host"),
        ("redis+cluster://u:secret@a:1,b:2", "redis+cluster://u:***@a:1,b:2"),
        ("redis://host?passwrod=secret&db=1", "redis://host?passwrod=***&db=1"),
        ("rediss://host?ssl_ca_certs=/ca.pem", "rediss://host?ssl_ca_certs=/ca.pem"),
        ("redis://u/v:secret@host", "redis://u/v:***@host"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


def options(store: str) -> Options:
    """Those of a `TrainPipeline`."""
    return Options(
        store=store,
        namespace="n",
        existing="refuse",
        lookahead=2,
        cache_rows=8,
        cache_max_rows=0,
        prefetch_depth=1,
        planner="inline",
        uneven="stop",
        unbounded=(),
        seed=0,
        row_dtype=None,
        rounding="nearest",
        nonfinite="stop",
        accumulate=1,
        sparse=None,
        checkpoint_dir="",
        checkpoint_every=0,
        keep=1,
        resume="auto",
        start_from="",
        start_without=(),
        take_over=False,
        durability="memory",
        timeout_s=1.0,
        peer_timeout_s=1.0,
    )


@pytest.mark.parametrize("url", URLS)
def test_urls_with_a_password(url: str) -> None:
    assert has_password(url)
    assert PASSWORD not in redact(url)


@pytest.mark.parametrize("url", ["", "redis://a:1, redis://user@b:2", "unix://user@/run/s.sock?db=1", "memory://a"])
def test_urls_without_one(url: str) -> None:
    assert not has_password(url)


def test_hosts_are_shown_beside_passwords() -> None:
    assert redact("redis://a:6379,redis://user@b:6379") == "redis://a:6379,redis://user@b:6379"
    assert redact("redis://u:p@a:1, redis://v:q@b:2") == "redis://u:***@a:1, redis://v:***@b:2"


@pytest.mark.parametrize("url", URLS)
def test_records_do_not_show_passwords(url: str) -> None:
    store = StoreConfig(url=url)
    config = Config(store=store)
    shown: list[object] = [
        store,
        config,
        CommandLine(config=config, options={}),
        options(url),
        Services(cacher_url="unix:/run/c", secret=PASSWORD, store_url=url, job_id=PASSWORD),
        Credentials(secret=PASSWORD, tls_key=PASSWORD.encode()),
        Access(secret=PASSWORD),
        Job(job_id=PASSWORD, label="0123", world_size=1),
    ]
    if url.startswith("redis+cluster"):
        seeds = parse_cluster_url(url)
        shown += [*seeds, Cluster(seeds=seeds)]
    elif "us/er" not in url:
        shown += [parse_urls(url), *parse_urls(url)]
    for record in shown:
        for text in (repr(record), str(record), f"{record}"):
            assert PASSWORD not in text
            assert type(record).__name__ in text or "redis" in text or "unix" in text
    assert repr(store) == repr(StoreConfig(url=redact(url)))


@pytest.mark.parametrize("url", URLS)
def test_messages_about_the_configuration_do_not_show_passwords(tmp_path, url):
    file = tmp_path / "job.toml"
    for arguments, content in (
        (["--store.namespace", f"{url}%"], ""),
        (["--cacher.url", f"x{url}"], ""),
        ([url], ""),
        ([f"--store={url}"], ""),
        ([f"--{url}"], ""),
        (["--run.device", url], ""),
        (["--run.steps", url], ""),
        (["--config", str(file)], f'store = "{url}"\n'),
        (["--config", str(file)], f'[store]\nurl = ["{url}"]\n'),
        (["--config", str(file)], f'[store]\nbuckets = "{url}"\n'),
        (["--config", str(file)], f'[store]\nnamespace = "{url}%"\n'),
        (["--config", str(file)], f"[store]\nurl = {url}\n"),
    ):
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(InputError) as caught:
            parse_config(arguments, "bagpipe")
        assert PASSWORD not in str(caught.value), arguments


@pytest.mark.parametrize("url", URLS)
def test_an_address_of_a_cacher_is_no_url_of_a_store(url: str) -> None:
    with pytest.raises(InputError, match="must be unix:PATH") as caught:
        parse_address(f"x{url}")
    assert PASSWORD not in str(caught.value)


def test_a_store_in_memory_has_no_password() -> None:
    schema = RowSchema(tables=(RowTable(name="a", dim=1),), optimizer="sgd")
    with pytest.raises(InputError, match=r"expected memory://.*got 'memory://user:\*\*\*@a'"):
        open_store(f"memory://user:{PASSWORD}@a", namespace="n", schema=schema, buckets=1, timeout_s=1)
