"""How fast one cacher on one core feeds N trainers, see README.md.

.arrow file ──daemon pinned to a core: read, plan for N ranks, cut, serialise──> gRPC ──> N real clients on other cores
                                                 (`plan` measures up to here, without a network)
"""
