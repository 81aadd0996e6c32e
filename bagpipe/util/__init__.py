"""Helpers of all rooms: environment check, packages, failpoints, machine facts, outputs (files), host_memory, sizes,
processor_time, parent_process, process_pool, `in_lasting_thread`, `map_ahead`, distinct_ids, documents (JSON and TOML),
priority, printing, `lasting_output`, `run_program`, redaction, secret_files, shared_file, `temporary_folder`,
`utf8_path`, the HTTP server for scrapes and probes (`StatusServer`), the programs (`COMMANDS`).
"""
