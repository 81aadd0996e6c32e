"""The embedding store: batched, ids in, row records out.

    URL ──open──> memory.MemoryStore | redis.RedisStore          both pass bagpipe.testing.store_conformance

    RedisStore   ids ──keys──> buckets ──routing──> commands per server ──transfer──> frames
                        wire: arrays <-> RESP bytes        exchange: frames <-> sockets, one deadline
                        namespace + record: the schema record, compared before anything is written
                        servers: redis-py connects, authenticates, asks
    embedded     a private server for one job, when no URL is given

keys, record, requests, routing and wire are pure; only servers and what imports it need redis-py.
"""
