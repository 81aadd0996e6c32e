"""Test tools: conformance suites of the interfaces, fakes, and ranks in threads.

store_conformance.check_store(make_store)   conformance checks of `bagpipe.store.interface.Store`
delete_conformance, fence_conformance       conformance checks of deletions and of fencing, part of the above
namespace_conformance                       conformance checks of job records, part of the above
fence_jobs                                  simulated jobs used by these checks
slow_store.SlowStore(store)                 store whose reads and writes wait at gates
local_peers.local_peers(world_size)         ranks of a job as threads of one process
local_links.LocalLinks                      tensor transfers between these ranks
plain_job.PlainJob(settings)                training job in one process, without torchrec or servers
recording_streams.RecordingStreams          device streams that log every call
repeated_calls.RepeatedCalls                fake of CUDA graphs that calls the function again
"""
