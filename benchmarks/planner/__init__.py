"""How fast does the oracle plan? See README.md."""
