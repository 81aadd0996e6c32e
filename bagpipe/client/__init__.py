"""The trainer's side of a cacher.

remote.RemoteBatches <── receiver.Receiver <──link.Link──> a cacher in another process
                       (address: where; agreement: what both must know alike)
        └── Step, Step, …  (step.StepSource: the interface)
"""
