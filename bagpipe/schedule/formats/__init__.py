"""Schedules as text, CSV, pictures and traces."""
