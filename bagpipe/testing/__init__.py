"""Test tools for implementers of the interfaces.

store_conformance.check_store(make_store)   conformance checks of `bagpipe.store.interface.Store`
slow_store.SlowStore(store)                 a store whose reads and writes wait at gates
proxy.FaultyProxy(url)                      a connection on which answers are lost, cut, late, or never come
disk.SmallDisk(folder, num_bytes=…)         a disk that fills up
clock.ClockJump(folder)                     a wall clock that jumps
zygote.Zygote(modules, folder)              forks programs from one process that has imported them
races.watch()                               races between streams, found without a device
faults.FaultSchedule(seed=…)                which faults, when: pure
chaos, soak                                 whole jobs under faults; one job for hours
"""
