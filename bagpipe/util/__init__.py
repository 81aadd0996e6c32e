"""Helpers of all rooms: environment check, failpoints, machine facts, output files, and `run_program`."""
