"""The trainer's side of a cacher, and the wire contract between them: `cacher.proto`, one gRPC stream per rank.

    trainer                                          cacher
      Hello(job, rank, settings, credits) ───────────>  compared with the cacher's own settings
                                   <──────────────────   Welcome(schema, identity)
      Start(run, phase, OracleSpec, first batch) ────>
                                   <──────────────────   RankBatch, RankBatch, …   (below watermark + credits)
      Ack(watermark)               ──────────────────>
                                   <──────────────────   End | Error
      Leave                        ──────────────────>   the rank is done; without it the cacher waits for the rank

The same daemon plans for jobs that bring their own batches, over `Plan` streams: `bagpipe.lookahead.remote`.

remote.RemoteBatches <── receiver.Receiver <── link.Link <── gRPC      (codec: RankBatch <-> bytes, no pickle)
                                                         <── shared_ring: large messages on one host
message: a RankBatch as the cacher sends it. index_codec: what a shard of a cacher sends it.
address: where a cacher listens.  access: which cacher a program uses.
agreement: settings that both sides share.  cacher_pb2, cacher_pb2_grpc: generated.
"""

import os

# gRPC's core logs to stderr every error that it also returns, and some events that are none. It reads the variable when
# `grpc` is imported, which the modules of this package do.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
