"""Data parallelism of the dense part: gradient all-reduce and parameter broadcasts.

replicated   whole model: gradients in buckets (buckets), summed while the backward runs
stage_sums   pipeline stages: gradients summed over the ranks that hold the stage
stage_shards pipeline stages: their optimizer state, gradients or parameters divided among the ranks that hold them
broadcast    equal parameters and buffers on all ranks, before and after training
sharded      whole model, its optimizer state, gradients or parameters divided among the ranks (ZeRO 1 to 3):

    find_units (shard_units) ─layers─> UnitShard (unit_shard), each with a FlatLayout (shard_layout)
        gradients ─sums in rank order─> segments ─optimizer─> share ─gathers (unit_gathers)─> parameters

        between uses parameters are closed (closed_parameter): a use elsewhere is an error; what
        autograd saves of them is a place (saved_places)

Exchanges of replicated and sharded run beside the computation, in the order asked for (ordered_exchanges).
"""
