"""Cost of annotating a log with next uses. See README.md."""
