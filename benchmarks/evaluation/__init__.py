"""Cost of evaluations during training against their own forwards, and of predictions against evaluation.

main ──flags──> trial: one fresh process per repeat ──outcome as JSON──> tables
"""
