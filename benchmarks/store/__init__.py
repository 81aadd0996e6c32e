"""How close is the store to the server's own limit? See README.md."""
