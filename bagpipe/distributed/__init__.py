"""The other ranks of a job, and what travels between them.

membership             which rank this is, from the launcher's environment
interface.Peers        what the engine needs of the others: exchange rows, agree on a batch, acknowledge a write-back
groups.TorchPeers      the same over torch.distributed: one process group per lane (exchange.LaneGroup), deadlines
dense.DenseParallel    dense gradients, summed in rank order under the backward (buckets)
links.TorchLinks       what the stages of a pipeline send each other
stage_sums.StageSums   dense gradients of the stages, summed over the ranks that hold each
sharing                equal models everywhere, before and after
failure                the first rank's error, told to all through the job's key-value store (keystore)
words                  what rank 0 tells the others, however long it takes
"""
