"""Cost of our runner against PyTorch's for the same pipeline, and step times that the simulator predicts.

workload   a chain of two stages, its batches, and the loop of one process around a step program
runners    the same stages, schedule and batches run by torch and by ours, interleaved, over one process group
forecast   costs of actions and messages ──simulate──> step time
main       two processes ─> results and tables
"""
