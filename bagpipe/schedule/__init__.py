"""Schedules as data: what runs where, in which order, and what waits for what. Pure: no torch, I/O or threads.

ir         Action, Program, Loop, StageGraph: the data; Graph: all dependencies, resolved
builders   StageGraph ──> Program or Loop of F, B, I, W per rank          prefetch_loop: the Loop around the dense part
schedule   a named schedule: options, builder, what it allows          registry   schedule name ──> schedule
lowering   Program ──passes──> Program with sends, reductions, optimizer; step_program: what a process runs
analysis   check (rules, deadlock, memory), simulate (times, bubble)
formats    text, CSV (PyTorch's too), grid, SVG, Perfetto
"""
