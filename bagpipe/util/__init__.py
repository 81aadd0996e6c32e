"""Helpers of all rooms: environment check, packages, failpoints, machine facts, outputs (files), host_memory, sizes,
distinct_ids, priority, `run_program`, secret_files, the HTTP server for scrapes and probes (`StatusServer`), and where
the programs are (`COMMANDS`)."""
