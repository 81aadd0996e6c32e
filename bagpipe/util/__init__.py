"""Helpers of all rooms: environment check, failpoints, machine facts, outputs (files), and `run_program`."""
