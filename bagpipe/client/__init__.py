"""The trainer's side of the cacher.

step.Step          one batch with its plan, for one rank
step.StepSource    where steps come from
remote.RemoteSteps ──socket──> a cacher in another process
"""
