"""The in-memory store, for tests and for tables that fit.

store: `MemoryStore`. table: rows by hash index. ledger: owners and write logs.
"""
