"""Cost of checkpoints. See README.md."""
