"""Test harnesses: programs under faults (chaos), long runs (soak), and a stream race detector (races)."""
