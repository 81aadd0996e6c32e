"""The wire contract between a cacher and its trainers.

    trainer                                   cacher
      Open(data, seed, credits) ──────────────>
                               <───────────────  Schema
      Start(phase, OracleSpec) ───────────────>
                               <───────────────  Step, Step, …     (at most `credits` not yet acknowledged)
      Ack                      ───────────────>
                               <───────────────  End | Error

`codec` turns records into bytes and back (no pickle); `channel` moves frames over a socket.
"""
