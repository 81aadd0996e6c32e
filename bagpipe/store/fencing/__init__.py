"""Fencing tokens and write logs of a namespace, as pure data."""
