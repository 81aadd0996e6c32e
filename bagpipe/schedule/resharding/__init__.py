"""Resharding: how a tensor passes from the layout of one stage's ranks to that of another stage's ranks.

layouts   Layout of an edge's end: split by examples, split by features, or replicated ──boxes──> the share of each rank
tasks     two Layouts ──unit_tasks──> UnitTask: a slice, the ranks that have it, those that need it
plan      UnitTask ──a sender, a route, chunks──> Broadcast ──in order──> Resharding ──messages──> what each rank sends
simulate  messages on a `bagpipe.cluster.network` ──> Timeline: their times
loads     least time that tasks keep each port ──> a lower bound
rounds    tasks with one receiver, so that no two of a round share a port
greedy    senders, routes and order: the best of rounds, rings and lists
search    by branch and bound, to judge greedy
"""
