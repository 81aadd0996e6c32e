"""Helpers of all rooms: environment check, packages, failpoints, machine facts, outputs (files), `run_program`, and
where the programs are (`COMMANDS`)."""
