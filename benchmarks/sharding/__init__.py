"""Memory, traffic and time of a dense part that is divided among the ranks.

main     parts, tables ──torchrun──> ranks     every level in the same processes, round by round
stages   the same layers as stages of a pipeline
"""
