"""Embedding modules whose rows live in a `RowCache`: torchrec collections and plain bags."""
