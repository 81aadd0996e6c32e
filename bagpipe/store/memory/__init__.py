"""The in-memory store, for tests and for tables that fit."""
