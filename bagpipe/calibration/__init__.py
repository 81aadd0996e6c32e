"""Calibration: this machine measured into a `ClusterModel`, for forecasts that can be compared with jobs run on it.

device        torch on small and large tensors ──> Device: operations, memory bandwidth, time of a call
rows          a private store server, and a writer with a fence ──> RowRates of the server, in processor time
cacher        a cacher process and one client per rank ──> ids a second that it reads, plans and serves
measured_job  a small job on `zipf_ids` in a process of its own ──> JobTimes: processor time of each operation
lanes         jobs of two sizes and dimensions ──> LaneTimes, share of the interpreter lock, cores in use
link          a TCP connection to itself ──> Link
machine       all of them ──> ClusterModel of one host, whose processes share its cores
"""
