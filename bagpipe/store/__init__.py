"""The embedding store: batched, ids in, row records out.

    URL ──open──> memory.MemoryStore | redis.RedisStore          both pass bagpipe.testing.store_conformance

    RedisStore   ids ──keys──> buckets ──routing──> commands per server ──transfer──> frames
                        wire: arrays <-> RESP bytes        exchange: frames <-> links, one deadline
                        client: a list of servers           cluster_client: a cluster's nodes, redirections followed
                        namespace + record: the schema record, compared before anything is written
                        urls, servers, cluster: redis-py connects, authenticates, encrypts, asks
                        fencing: who may write, what was written     ledger: taking over, commit     watch: servers
                        durability, rights: what a server must promise, and must allow
    embedded     a private server for one job, when no URL is given

durability, fencing, keys, record, requests, routing, topology and wire are pure; only servers and what
imports it need redis-py.
"""
