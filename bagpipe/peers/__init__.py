"""The other ranks of a job, and what travels between them.

interface.Peers     what the engine needs of them: exchange rows, agree on a batch, acknowledge a write-back
groups.TorchPeers   the same over torch.distributed: one process group per lane, deadlines, named errors
dense               DistributedDataParallel with sums in rank order
failure             the first rank's error, told to all
"""
