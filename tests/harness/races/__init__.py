"""Finds races between streams without a device: the real engine on CPU tensors, every lane a modelled stream.

    with watch() as races:                      the device kind ``cpu`` now has streams, events and staging as CUDA has
        run_job(config)                         each op's reads and writes are noted on its lane's stream
    races.check()                               two accesses, one a write, that nothing orders: Race

Vector clocks say what is ordered. A stream's op comes after the stream's earlier ops, after the events its stream
waited for, and after what the enqueuing thread knew to be done (events it synchronised with). Nothing else counts: that
the CPU did the work at once, in some order, hides no race.
"""
