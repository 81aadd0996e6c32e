"""A private Redis-protocol server for one job.

embedded: `EmbeddedServer`, started and stopped with the job; orphans: the server that a killed job left behind.
"""
