"""Helpers of all rooms: environment check, packages, failpoints, machine facts, outputs (files), host_memory, sizes,
processor_time, parent_process, process_pool, `map_ahead`, distinct_ids, documents (JSON and TOML), priority, printing,
`run_program`, redaction, secret_files, `temporary_folder`, the HTTP server for scrapes and probes (`StatusServer`), the
programs (`COMMANDS`).
"""
