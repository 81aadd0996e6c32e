"""Schedules as data: who does what in which order, what waits for what. Pure: no torch, no I/O, no threads.

ops ──> actions: Action <──text──> "0F1"
            │
prefetch, … builders ──> loop.Loop ──unroll(n)──> program.Program
                            │                         │
                  check_loop, period              graph.Graph: all dependencies
                            │                         ├──> check     valid and free of deadlock, or ScheduleError
                     pipeline.runner                  ├──> simulate  times, bubble, occupancy ──> render
                                                      └──> pipeline.interpret, one action after the other
catalog: the schedules `python -m bagpipe schedule` knows by name
"""
