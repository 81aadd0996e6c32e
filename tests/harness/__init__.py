"""Test harnesses: faults (chaos), random configurations (fuzz), results of two commits (same_bits), long runs (soak), a
stream race detector (races).
"""
