"""Checks and simulation of programs.

Program ──check: rules, messages, Graph.order, memory──> valid, or ScheduleError        Loop ──check_loop, cycles──┘
residency: divided parameters are whole where stages compute          factors: K-FAC's inverses are of whole factors
Program, costs ──simulate──> Simulation: times, bubble, occupancy, critical path
Program of a batch, costs ──periodic──> its steady state when it is repeated: time per batch, starts
Loop, costs ──steady_state: cycle_ratio──> time of a turn, and which operations it depends on
Program ──version_table──> VersionUse per action ──kept_weights──> versions and predictions kept by stage
Cover: operators of a model in stages ──check_cover──> valid, or ScheduleError
"""
