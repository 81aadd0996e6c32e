"""Helpers of all rooms: environment check, packages, failpoints, machine facts, outputs (files), sizes in bytes,
`run_program`, and where the programs are (`COMMANDS`)."""
