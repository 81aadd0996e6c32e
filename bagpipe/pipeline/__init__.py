"""Walking a schedule: the runner, and what it needs from threads, streams and signals.

schedule.loop.Loop, handlers ──compile──> steps ──> runner.Runner.run() ──> report.Report
                                                      │  one lane.Lane per thread, born and joined inside run()
                                                      ├── board   how far every op is, who waits, the end, the error
                                                      ├── stream  lane -> stream; events order device lanes
                                                      │           (cuda_stream: CUDA's)
                                                      ├── trace   spans of actions and waits ──> Perfetto
                                                      └── device_times  when a device did them, for the trace
signals: SIGINT, SIGTERM ──> Runner.request_stop()
interpret: the same handlers, one action after the other; the reference the runner is compared with
"""
