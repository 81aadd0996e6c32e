"""What do checkpoints cost? See README.md."""
