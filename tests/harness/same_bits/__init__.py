"""Same bits: the jobs of a fixed list, run at another commit and in this checkout, must have the same results.

    plan.JOBS ──each──> BASE, in a git worktree: whole run ────────────┐
                          │  (kept by commit and job)                  ├─ equal digests and metrics? ──> Verdict
                          │             HEAD, this checkout: whole run ┤
                          └─ half a run's checkpoints ──> HEAD: resumed ┘

    python -m tests.harness.same_bits --base 7bfa9477 --jobs 2 --only 'chimera*' zb-v

`plan` is the list, `runs` runs a job at a checkout, `comparison` compares results, `cli` is the command. Jobs run as
those of `tests.harness.fuzz` do: each checkout has one interpreter, which has imported its programs and forks them.
"""
