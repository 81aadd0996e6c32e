"""Time of a batch of a dense model under a byte budget, against the same model without one; measured and simulated.

main ──flags──> contest: one model per budget, batches in turns ──seconds, copies, digests──> tables
"""
