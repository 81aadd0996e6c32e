"""The embedding store: batched, ids in, row records out.

    interface    Store: read, write, ledger, for every store

    URL ──open──> memory.MemoryStore | redis.RedisStore          both pass bagpipe.testing.store_conformance

    RedisStore   ids ──keys──> buckets ──routing──> commands per server ──codecs──> frames of requests
                 resp_rows, row_replies: arrays <-> RESP    request_pipeline: frames <-> links, one deadline
                 shard_client: a list of servers            cluster_client: a cluster's masters, redirections
                 namespace + schema_record: compared before anything is written; job_record: who made the rows
                 urls, servers, cluster: redis-py connects, authenticates, encrypts
                 server_checks: ACL rights, eviction, durability, restarts
                 row_checksum: a check word after every row; row_sums: their sum in each bucket;
                 audit: the sums of all rows of a store; sizing: their bytes in a server
                 fencing: owner tokens, write logs          ledger: acquire, commit, invalidate
    process      the client in a process of its own: `ProcessStore`
    passwords    the password of store.url, given apart
    server       a private server for one job, when no URL is given

fencing, keys, schema_record, sizing, validation, routing, cluster_routing, row_checksum, row_sums, resp, resp_rows and
row_replies do no I/O. Only redis/ needs redis-py.
"""
