"""A private Redis-protocol server for one job."""
