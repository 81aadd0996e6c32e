"""Second-order steps: K-FAC preconditions the gradients of linear layers before the optimizer's step.

    layers       linear layers of a model or stage, and the rank that owns each
    capture      inputs and output gradients of a micro-batch ──> factors: sums, averages, inverses of one layer
    kfac         one method per action: COV_A COV_G REDUCE_COV X_INV PRECOND X_BCAST, and the limit by kappa
    exchange     what the holders of a layer send each other        step_sizes: the same between stages
    optimizer    all of it around an optimizer of a plain PyTorch loop
    costs        operations and bytes by formula

`bagpipe.schedule.lowering.precondition` places the actions into the bubbles of a schedule.
"""
