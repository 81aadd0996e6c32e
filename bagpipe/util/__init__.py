"""Helpers of all rooms: environment check, packages, failpoints, machine facts, outputs (files), host_memory, sizes,
processor_time, distinct_ids, documents (JSON and TOML), priority, printing, `run_program`, secret_files, redaction,
`temporary_folder`, the HTTP server for scrapes and probes (`StatusServer`), and where the programs are (`COMMANDS`)."""
