"""How close to the offline optimum is the oracle? See README.md."""
