"""Calibration: this machine measured into a `ClusterModel`, for forecasts that can be compared with jobs run on it.

device   torch on small and large tensors ──> Device: operations, memory bandwidth, time of a call
rows     a private store server and this library's client ──> RowRates of both, in processor time
planner  the oracle on batches like Criteo's ──> ids a second of one core
link     a TCP connection to itself ──> Link
machine  all of them ──> ClusterModel of one host, whose processes share its cores
"""
