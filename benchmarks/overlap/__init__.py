"""Is embedding access hidden behind computation, when the store is at the far end of a 1 Gbit/s link?

link       network namespace, veth, tbf on both ends, a server inside           (needs root)
workload   named models and data; their configurations
resident   compute only: the same batches, every row in device memory, no threads
trial      one job through the link: direct mode or a cache -> step times, waits, bytes
experiment workloads x grid x repeats, interleaved -> results.json
report     results.json -> tables (Markdown) and a plot (SVG)
"""
