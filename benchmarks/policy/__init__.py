"""Re-fetches of the oracle against the offline optimum. See README.md."""
