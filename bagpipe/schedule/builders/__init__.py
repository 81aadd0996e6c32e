"""Builders of schedules, one file per family. Pure functions; the registry names them.

StageGraph, chunks ──builder──> Row per rank ──dense_program──> Program of one batch           synchronous
                                Template per lane ──dense_loop──> Loop, a steady state         asynchronous
depths, StepProgram ──prefetch_loop──> Loop around the dense part: read, fetch, evict, insert, write back

gpipe, one_f_one_b, interleaved, breadth_first, zero_bubble, dualpipe_v, chimera, graphpipe, asynchronous: the families
row: one lane
"""
