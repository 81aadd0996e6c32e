"""Clusters: what a job runs on, as data. Pure: no torch, no threads.

model         ClusterModel: devices, links, trainer hosts, store servers, cachers, object storage, prices
cluster_file  TOML and presets <──> ClusterModel
network       Network: ports, bandwidths and latencies between ranks ──> times of messages and collectives
"""
