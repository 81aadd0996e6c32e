"""Lowering: from the compute actions of a builder to all actions of a process.

Program ──rewrite, embedding, optimizer, sends: passes──> Program with REC, X_EMBED, REDUCE_GRAD, OPT, SEND, RECV
recompute: the shares of micro-batches whose activations are recomputed
gathers: UNSHARD and RESHARD of stages whose parameters are divided, by looking ahead in the rows
agreement: X_MEASURE and X_AGREE before the steps
precondition: COV_A, COV_G, X_INV, PRECOND of K-FAC; covariances: what they wait for; placement: put into gaps
partial_backward: one batch without the backwards that are left out
receives: RECVs in lanes of their own, where lanes choose their order
replicas: stages on different numbers of ranks, each with its part of every micro-batch
turns: the lanes where actions of two batches alternate
step_program: the passes for training ──> StepProgram ──stage_lanes──> StageLanes of one process
"""
