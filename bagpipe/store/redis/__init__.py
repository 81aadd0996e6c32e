"""The Redis-protocol store: wire format, connections, clusters, fenced writes."""
