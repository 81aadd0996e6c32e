"""Fencing tokens and write logs of a namespace. No I/O."""
