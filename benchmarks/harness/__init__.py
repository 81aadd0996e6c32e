"""Code shared by all benchmarks: command line, interleaving, results, tables, plots.

benchmark   flags ──> parts ──measure──> results ──> report       one `Benchmark` record per folder, `run_benchmark`
rounds      contestants take turns; medians, spreads, ratios paired by round
results     results.json: parts of one machine, each with the run that measured it
report      Markdown tables between two marks of the README, and their provenance
plot        SVG panels (matplotlib)
click_logs  --data.path of Criteo's click logs
child       a program in a process of its own, and what it leaves in a file
machine     processor, versions, load, digest of the code
fenced_store, job   what writes rows: a store and an engine with the fence of a job
processor_use, thread_times   CPU time of other jobs; of our threads and processes by part
shaped_link   a store server behind a 1 Gbit/s link
"""
