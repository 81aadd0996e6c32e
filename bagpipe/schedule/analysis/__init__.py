"""Checks and simulates programs: validity rules, deadlocks, memory, times."""
