"""Throughput of one cacher on one core that feeds N trainers. See README.md.

.arrow file ──daemon pinned to a core: read, plan for N ranks, cut, serialise──> gRPC ──> N real clients on other cores
                                                    (`plan` measures up to here, without a network)
"""
