"""Shipped test tools for whoever implements one of the interfaces.

store_conformance.check_store(make_store)   every promise of `bagpipe.store.interface.Store`
slow_store.SlowStore(store)                 a store whose exchanges wait at a gate the test opens
"""
