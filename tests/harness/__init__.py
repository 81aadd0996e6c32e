"""Test harnesses: faults (chaos), random configurations (fuzz), long runs (soak), a stream race detector (races)."""
