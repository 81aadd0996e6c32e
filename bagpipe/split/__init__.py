"""Splits a model into stages: trace, shape propagation, assignment, stage modules, measured costs."""
