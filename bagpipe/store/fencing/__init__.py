"""Fencing tokens and write logs of a namespace. No I/O.

fence: owner tokens, names of keys and logs, the `Ledger` interface. writer_logs: the logs of one writer. presence:
what a namespace has lost, for readers.
"""
