"""Chaos: small jobs that are killed, robbed and lied to, started again until they end, and compared bit for bit.

    seed ──> FaultSchedule ──armed one by one──> Injector ──signals, damage──> Scene: ranks, daemon, store, disk, proxy
    ChaosJob ──> Run: start ranks ─> watch ─> all ended ─> heal ─> start again … until exit 0 ─> result == reference?
                                                                                                └──> Verdict

    python -m tests.harness.chaos --runs 200 --seed 1 --ranks 1,2        every run prints its seed
    python -m tests.harness.chaos --runs 1 --seed 17 …                   the run with seed 17 alone

All starts of the job are forks of one `Zygote`; the daemon too. The programs are those of the checkout in the current
folder. A start of the job may end well, or with a code of 1 or 2 and one line that begins with "error: ". All else is a
defect: another end, a start that does not end, a job that cannot get on, another result.
"""
