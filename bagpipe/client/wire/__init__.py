"""The wire contract between a cacher and its trainers: `cacher.proto`, one stream per rank.

    trainer                                          cacher
      Hello(who, settings, credits) ──────────────────>  compared with the cacher's own
                                   <──────────────────   Welcome(schema, identity)
      Start(run, phase, OracleSpec, from where) ──────>
                                   <──────────────────   Step, Step, …   (below watermark + credits)
      Ack(watermark)               ──────────────────>
                                   <──────────────────   End | Error
      Leave                        ──────────────────>   the rank is done; without it, it is waited for

`codec` turns steps into bytes and back (no pickle), `envelope` wraps them; `cacher_pb2*` are generated.
"""
