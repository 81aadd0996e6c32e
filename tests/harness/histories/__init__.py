"""Histories: clients append to rows of a store and read them while faults happen; a pure checker judges what they saw.

    seed ──> Plan ──> Site: servers, proxies ──faults── Nemesis
                        ^    ^
                        │    └── readers, writers of each job (processes) ──> events: invoke, then ok, fail or unknown
                        └─────── takeovers, checkpoints ─────────────────────────┘
    events ──paired──> History ──check──> findings: anomaly, row, append, operations

    python -m tests.harness.histories --runs 100 --seed 1      every history prints its seed
    python -m tests.harness.histories --check FILE             the checker alone, on a history that was written

A row's value is the list of the numbers of the appends that wrote it, oldest first. Each append is one fenced write of
one or several rows: the lists as its job last knew them, and its own number at their ends. Every row belongs to one
writer of a job, as rows of a cache belong to one rank, so lists only grow but for what a fault may take away:

| server | what SIGKILL takes | in a history |
|---|---|---|
| `memory`, `memory-pair`: two servers | all its rows | a loss of these rows |
| `everysec` | what is not in the append-only file yet: two seconds, if the disk syncs | a loss that keeps a prefix |
| `always`, `pair`: two servers | nothing that was acknowledged | no loss |
| `cluster` | groups that the replica, which takes over, lacks | a loss of that master's rows that keeps a prefix |

During a loss of a cluster's rows an isolated master still answers, so reads of those rows may be stale. After it the
writer that lost acknowledged groups gets no further acknowledgement in their buckets.
"""
