"""The Redis-protocol store: wire format, connections, clusters, fenced writes.

store            `RedisStore` over a ShardClient: shard_client (list of servers), cluster_client (Redis Cluster)
row_reader       its reading half, which a serving client has alone
routing          rows to buckets, commands and servers; cluster_routing: slots, redirections
read_codec       frames of requests to read; row_replies: their replies, many commands at once
row_codecs       frames of requests to write: fenced_write (scripts); resp_rows: rows as RESP; resp: short replies
delete_codec     frames of requests to delete: fenced_delete (a script); log_guard: what both kinds of script share
writing_client   the client of the writing thread, which does all of these
link             one socket; request_pipeline: requests on many links, one deadline
passing          answers that are waited for; remedies: what to do about a server without memory or disk
bounded_socket   replies to administrative commands, bounded in time and bytes; reply_forms: what each may be
urls, servers, cluster, server_checks, server_versions, namespace: connecting and checking; bucket_scan: the names of a
bucket's rows; stored_record: the records of a namespace of unknown rows; ledger, ledger_scripts: owners and logs
"""
