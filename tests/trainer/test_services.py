from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.sections import CacherConfig, Config, DataConfig, RunConfig, StoreConfig
from bagpipe.errors import InputError
from bagpipe.jobs.ranks import Ranks
from trainer.services import open_services


def silent(phase: str, **values: object) -> None:
    """Nobody is told."""


class _TwoHosts(Ranks):
    """Rank 0 of two ranks on different hosts."""

    def gather(self, value: Any) -> list[Any]:
        return [value, {"host": "elsewhere", "address": "127.0.0.1"}]


DATA = DataConfig(limit=100, workers=0)


@pytest.mark.redis
@pytest.mark.multiproc
def test_services_without_a_url_are_started(tmp_path: Path) -> None:
    with ExitStack() as stack:
        services = open_services(Config(data=DATA, run=RunConfig(dir=str(tmp_path))), Ranks(), stack, silent)
        assert services.cacher_url.startswith("unix:")
        assert services.secret == ""
        assert services.store_url == f"unix://{tmp_path}/store.sock"
        socket = Path(services.cacher_url.removeprefix("unix:"))
        assert socket.exists()
    assert not socket.exists()
    assert not (tmp_path / "store.sock").exists()


def test_services_with_a_url_are_not_started() -> None:
    config = Config(cacher=CacherConfig(url="unix:/run/cacher.sock"), store=StoreConfig(url="redis://db:6379"))
    with ExitStack() as stack:
        services = open_services(config, Ranks(), stack, silent)
        assert (services.cacher_url, services.store_url) == ("unix:/run/cacher.sock", "redis://db:6379")
        assert services.job_id != open_services(config, Ranks(), stack, silent).job_id


def test_the_password_of_the_store_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAGPIPE_STORE_PASSWORD", "of the/variable")
    file = tmp_path / "password"
    file.write_text("of-the-file\n")
    file.chmod(0o600)
    for path, word in (("", "of%20the%2Fvariable"), (str(file), "of-the-file")):
        store = StoreConfig(url="redis://trainer@db:6379", password_file=path)
        config = Config(cacher=CacherConfig(url="unix:/run/cacher.sock"), store=store)
        with ExitStack() as stack:
            assert open_services(config, Ranks(), stack, silent).store_url == f"redis://trainer:{word}@db:6379"
    file.chmod(0o644)
    with pytest.raises(InputError, match=r"^store\.password_file .*: expected a file that other users cannot read"):
        open_services(config, Ranks(), ExitStack(), silent)


def test_several_hosts_need_a_store_they_can_reach() -> None:
    with pytest.raises(InputError, match=r"store.url is empty, but the job's ranks are on 2 hosts"):
        open_services(Config(data=DATA), _TwoHosts(), ExitStack(), silent)


@pytest.mark.multiproc
def test_a_cacher_for_several_hosts_listens_on_the_network_and_asks_for_a_secret() -> None:
    with ExitStack() as stack:
        services = open_services(
            Config(data=DATA, store=StoreConfig(url="redis://db:6379")), _TwoHosts(), stack, silent
        )
        assert services.cacher_url.startswith("127.0.0.1:"), "the address on the way to the other host"
        assert len(bytes.fromhex(services.secret)) == 32
