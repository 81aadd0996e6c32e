"""Execution of schedules: the runner, its lanes, streams and signal handling.

schedule.ir.loop.Loop, handlers ──compile──> steps ──> runner.Runner.run() ──> report.Report
                                                      │  one lane.Lane per thread, started and joined inside run()
                                                      ├── free_order  the next step, where a lane chooses
                                                      │           (order_log: orders given, and taken down)
                                                      ├── board   progress of ops, waiting lanes, end, error
                                                      ├── stream  lane -> stream; events order device lanes
                                                      │           (cuda_stream: CUDA's)
                                                      ├── trace   spans of actions and waits ──> Perfetto
                                                      └── device_times  device times of actions, for the trace
signals: SIGINT, SIGTERM ──> Runner.request_stop(), or deferred to the end of a step
interpret: runs the same handlers sequentially; the reference for the runner

devices: the streams of each device type
copy_lane: copies between device and host beside the compute, outside of a schedule
"""
