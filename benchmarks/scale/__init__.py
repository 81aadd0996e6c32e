"""What grows with what? See README.md."""
