"""How fast does a log go through the oracle? See README.md."""
