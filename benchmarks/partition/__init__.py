"""How long does the partitioner search, and how good is the partition it finds? See README.md."""
