"""A private Redis-protocol server for one job.

embedded: `EmbeddedServer`, started and stopped with the job.
"""
