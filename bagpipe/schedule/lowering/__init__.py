"""Lowering: from the compute actions of a builder to everything a process runs."""
