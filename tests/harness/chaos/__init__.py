"""Chaos: small jobs under injected faults, restarted until they end, then compared bit for bit with a reference run.

    seed ──> FaultSchedule ──armed one by one──> Injector ──signals, damage──> Scene: ranks, daemon, store, disk, proxy
    ChaosJob ──> Run: start ranks ─> watch ─> all ended ─> heal ─> start again … until exit 0 ─> result == reference?
                                                                                                └──> Verdict

    python -m tests.harness.chaos --runs 200 --seed 1 --ranks 1,2        every run prints its seed
    python -m tests.harness.chaos --runs 1 --seed 17 …                   the run with seed 17 alone

All starts of the job, and the daemon, are forks of one `Zygote`. The programs are those of the checkout in the current
folder. A start can exit with 0, or with 1 or 2 and one line that begins with "error: ". Anything else is a defect:
another exit, a start that does not end, a job that makes no progress, another result.
"""
