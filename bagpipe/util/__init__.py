"""Helpers of all rooms: environment check, packages, failpoints, machine facts, outputs (files), host_memory, sizes,
distinct_ids, documents (JSON and TOML), priority, printing, `run_program`, secret_files, `temporary_folder`, redaction,
the HTTP server for scrapes and probes (`StatusServer`), and where the programs are (`COMMANDS`)."""
