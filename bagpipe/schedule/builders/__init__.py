"""Builders of schedules, one file per family. Pure functions; the registry names them.

StageGraph, chunks ──builder──> Row per rank ──dense_program──> Program of one batch           synchronous
                                Template per lane ──dense_loop──> Loop, a steady state         asynchronous
depths, StepProgram ──prefetch_loop──> Loop around the dense part: read, fetch, evict, insert, write back

whole_model: the dense part in one lane of it

gpipe, one_f_one_b, shifted, interleaved, breadth_first, zero_bubble, v_shape, dualpipe_v, chimera, graphpipe,
asynchronous: the families; dynamic: an order of what is ready; zero_bubble_auto: the best order for given costs;
row: one lane
"""
