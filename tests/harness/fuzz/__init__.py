"""Fuzz: random jobs over the whole configuration space, each run without a cache, with one, and killed and resumed.

    (seed, number) ──draw──> Draw: log, job settings, twins ──write_log──> files of any format
        Twin direct     cache.rows = 0 ──────────────────────────────┐
        Twin cached     another cache, lookahead, policy, store … ───┤ equal results, or the same refusal? ──> Verdict
        Twin resumed    others again, killed at failpoints ──────────┤        wrong: shrink, keep the folder
            its last checkpoint, exported ── plain_loop: torch ──────┘        (plain_loop: float64, within 1e-12)

    python -m tests.harness.fuzz --runs 200 --seed 1       every run prints its number
    python -m tests.harness.fuzz --runs 1 --seed 1 --first 17     run 17 of seed 1 alone
    python -m tests.harness.fuzz --pairs                          every pair of features, in about 80 jobs

`space` holds the values of every key, `draw` the records, `drawing` their generator; the configuration's own rules
decide what is valid. `log` and `log_files` make the data, `models` a model with bad losses. `twin` runs the starts of
one twin on a `site` (interpreter, servers), `trial` runs and compares the twins of a draw, `shrink` looks for a simpler
wrong one. `covering` makes rows with every pair of values, `axes` says of which features, `pairs` makes jobs of the
rows. `capacity` and `plain_loop` are programs that the trial forks; `cli` is the command.
"""
