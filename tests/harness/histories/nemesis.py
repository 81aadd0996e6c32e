"""`Nemesis`: carries a plan's faults out, by name, and records what each may take from whom."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable

from tests.harness.histories.clients import Budget
from tests.harness.histories.events import Kind, Phase, Recorder
from tests.harness.histories.jobs import Jobs
from tests.harness.histories.plan import FaultKind
from tests.harness.histories.sites import NUM_BUCKETS, ClusterSite, ServerSite
from tests.harness.proxy import ConnectionFault, ConnectionFaultKind
from tests.store.nodes import await_true

__all__ = ["Nemesis"]

_PROCESS = "nemesis"
_CUTS = (
    ConnectionFaultKind.DROP_ANSWER,
    ConnectionFaultKind.CUT_ANSWER,
    ConnectionFaultKind.CUT_REQUEST,
    ConnectionFaultKind.RESET,
    ConnectionFaultKind.SILENCE,
)
#: Connections that one fault cuts, and the bytes of requests and answers it lets through.
_NUM_CUTS, _CUT_BYTES = 4, 3_000
#: Appends while a replica lags, or a sync is held.
_SOME_APPENDS = 6
#: A fault meets a takeover before so many commands.
_TAKE_OVER_COMMANDS = 20


class Nemesis:
    """Used by the thread that opened the site.

    Args:
        site, jobs, recorder, budget: of the history.
        draw: random choices.
    """

    def __init__(
        self, site: ServerSite | ClusterSite, jobs: Jobs, recorder: Recorder, budget: Budget, draw: random.Random
    ) -> None:
        self._site = site
        self._jobs = jobs
        self._recorder = recorder
        self._budget = budget
        self._draw = draw
        self._faults: dict[str, Callable[[], None]] = {
            "kill-server": self._kill_server,
            "kill-syncing-server": self._kill_syncing_server,
            "kill-syncing-checkpoint": lambda: self._kill_syncing_server(with_checkpoint=True),
            "kill-server-in-take-over": lambda: self._in_take_over(self._kill_server),
            "cut": self._cut,
            "cut-take-over": self._cut,
            "kill-writers": lambda: jobs.signal(signal.SIGKILL),
            "pause-writers": jobs.pause_and_replace,
            "take-over": lambda: None,
            "no-commit": self._no_commit,
            "fail-over": self._fail_over,
            "lagging-fail-over": self._lagging_fail_over,
            "lagging-checkpoint": lambda: self._lagging_fail_over(with_checkpoint=True),
            "fail-over-in-take-over": lambda: self._in_take_over(self._fail_over),
            "hand-over": self._hand_over,
            "isolate-master": self._isolate_master,
            "move-slot": self._move_slot,
            "move-slot-in-take-over": lambda: self._in_take_over(self._move_slot),
        }

    def fire(self, kind: FaultKind) -> None:
        """Carry one fault out; at its end all servers answer again."""
        self._recorder.invoke(_PROCESS, Kind.FAULT, name=kind.name)
        self._faults[kind.name]()

    def _kill_server(self) -> None:
        site = self._server_site
        number = self._draw.randrange(site.num_servers)
        if site.durability == "always":
            site.kill(number)
            site.restart(number)
            return
        loss = self._recorder.invoke(_PROCESS, Kind.LOSS, rows=site.rows_of(number), keeps_prefix=True, restarts=True)
        site.kill(number)
        site.restart(number)
        self._recorder.complete(loss, Phase.OK)

    def _kill_syncing_server(self, *, with_checkpoint: bool = False) -> None:
        """The server is killed after groups that it acknowledged and has not written to its file."""
        disk = self._server_site.disk
        if disk is None:
            return self._kill_server()
        disk.hold()
        self._let_append()
        await_true(lambda: disk.is_waiting or self._jobs.has_ended, "a sync")
        self._let_append()
        if with_checkpoint:
            self._doomed_checkpoint()
        self._kill_server()

    def _in_take_over(self, fault: Callable[[], None]) -> None:
        """A fault after some commands of a takeover."""
        errors: list[BaseException] = []

        def take_over() -> None:
            try:
                self._jobs.take_over(with_writers=False)
            except BaseException as error:
                errors.append(error)

        target = self._site.num_commands + self._draw.randrange(_TAKE_OVER_COMMANDS)
        thread = threading.Thread(target=take_over, name="history-take-over", daemon=True)
        thread.start()
        await_true(lambda: not thread.is_alive() or self._site.num_commands >= target, "a takeover")
        fault()
        thread.join()
        if errors:
            raise errors[0]

    def _let_append(self) -> None:
        """Let the writers append a few times."""
        target = self._recorder.num_appends + _SOME_APPENDS
        self._budget.add(_SOME_APPENDS)
        await_true(lambda: self._recorder.num_appends >= target or self._jobs.has_ended, "appends")

    def _cut(self) -> None:
        if isinstance(self._site, ClusterSite):
            self._site.cut()
            return
        for _ in range(self._draw.randint(1, _NUM_CUTS)):
            fault = ConnectionFault(
                kind=self._draw.choice(_CUTS), at=self._draw.randint(1, 10), num_bytes=self._draw.randrange(_CUT_BYTES)
            )
            self._site.cut(self._draw.randrange(self._site.num_servers), fault)

    def _no_commit(self) -> None:
        self._jobs.checkpoint(commits=False)
        self._jobs.signal(signal.SIGKILL)

    def _fail_over(self) -> None:
        site = self._cluster_site
        loss = self._recorder.invoke(_PROCESS, Kind.LOSS, rows=site.rows_of_first(), keeps_prefix=True, restarts=False)
        with site.impatient():
            site.kill_first()
            site.await_replacement()
        self._recorder.complete(loss, Phase.OK)

    def _lagging_fail_over(self, *, with_checkpoint: bool = False) -> None:
        self._cluster_site.make_replica_lag()
        self._let_append()
        if with_checkpoint:
            self._doomed_checkpoint()
        self._fail_over()

    def _doomed_checkpoint(self) -> None:
        """A checkpoint whose files are safe, and of which the store will lose groups, logs and perhaps the commit."""
        commits = self._draw.random() < 0.5
        self._jobs.checkpoint(commits=commits)
        if not commits:
            self._jobs.signal(signal.SIGKILL)
        elif self._draw.random() < 0.5:
            self._let_append()

    def _hand_over(self) -> None:
        site = self._cluster_site
        replica, first = site.replica.client, site.first.client
        await_true(lambda: replica.info("replication").get("master_link_status") == "up", "the replica to follow")
        replica.execute_command("CLUSTER", "FAILOVER")
        site.await_replacement()
        await_true(lambda: first.info("replication")["role"] == "slave", "the master to step down")

    def _isolate_master(self) -> None:
        """The master is stopped until it is replaced; then it goes on, and still believes that it is the master."""
        site = self._cluster_site
        loss = self._recorder.invoke(_PROCESS, Kind.LOSS, rows=site.rows_of_first(), keeps_prefix=False, restarts=False)
        process_id = site.first.server.process_id
        with site.impatient():
            os.kill(process_id, signal.SIGSTOP)
            try:
                replica = site.replica.client
                await_true(lambda: replica.info("replication")["role"] == "master", "the replica to take over")
            finally:
                os.kill(process_id, signal.SIGCONT)
            await_true(lambda: site.first.client.info("replication")["role"] == "slave", "the master to step down")
            site.await_whole()
        self._recorder.complete(loss, Phase.OK)

    def _move_slot(self) -> None:
        site = self._cluster_site
        slot = site.slot_of(self._draw.randrange(NUM_BUCKETS))
        source = site.nodes.owner_of(slot)
        target = self._draw.choice([node for node in site.nodes.masters if node is not source])
        site.nodes.move(slot, source, target)
        site.await_whole()

    @property
    def _server_site(self) -> ServerSite:
        assert isinstance(self._site, ServerSite), "a fault of servers on their own"
        return self._site

    @property
    def _cluster_site(self) -> ClusterSite:
        assert isinstance(self._site, ClusterSite), "a fault of a cluster"
        return self._site
