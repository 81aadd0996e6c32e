"""The trainer's side of a cacher.

remote.RemoteSteps <── receiver.Receiver <──link.Link──> a cacher in another process
                       (address: where; agreement: what both must know alike)
        └── Step, Step, …  (step.StepSource: the interface)
"""
