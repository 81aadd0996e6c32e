"""Forecasts: step time, memory and price of whole jobs on a cluster, before it is rented. Pure: no torch, no threads.

traffic   JSON of `data replay` ──> RowTraffic: rows that each batch reads, writes and exchanges, by cache and window
stages    operators ──> StagedDense: a dense part in stages, from its schedule's simulation
job       JobShape: ranks, batch, cache, window, row size, dense part
costs     JobShape, RowTraffic, ClusterModel ──> seconds of every operation of the training loop, and what bounds it
forecast  the loop that the runner walks (`prefetch_loop`) with these costs, in its steady state ──> Forecast
axes      settings of a point: flag, column, how a cluster or job gets another value
sweep     replay settings x values of axes ──> points ──> a Forecast each, here or in processes
pareto    points ──> those that no other beats in time, memory and price ──> fastest, cheapest, knee
what_if   a cluster and a job with one resource doubled ──> step time and price
report    all of it ──> one HTML file
"""
