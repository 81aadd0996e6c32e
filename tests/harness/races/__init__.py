"""Detects races between streams without a device: the real engine on CPU tensors, every lane a modelled stream.

    with watch() as races:                      device type ``cpu`` gets streams, events and staging as CUDA has
        run_job(config)                         each op's reads and writes are recorded on its lane's stream
    races.check()                               two unordered accesses, one of them a write: Race

Vector clocks define the order. An op on a stream comes after the stream's earlier ops, after the events its stream has
waited for, and after everything the enqueuing thread has synchronised with. Nothing else counts: the order in which the
CPU happened to do the work hides no race.
"""
