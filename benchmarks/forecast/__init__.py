"""Forecasts against jobs on this machine: main runs them, cases lists them."""
