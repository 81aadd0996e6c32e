"""Training from a remote store beside other ways to train the same model on the same batches.

main ──Task as JSON──> trial: one fresh process per contender and repeat (two for two ranks) ──Outcome──> report
          │                 ├─ ours           cached, direct: the trainer's parts, cacher process, RedisStore
          │                 ├─ local_tables   fbgemm's TBE, nn.EmbeddingBag(sparse=True)      all rows in memory
          │                 ├─ torchrec_loop  torchrec's DistributedModelParallel: one rank, pipelined, two ranks
          │                 └─ redis_loop     redis-py, row by row; with and without an LRU cache
          └─ ShapedServer: the store behind 1 Gbit/s, for the contenders that use one
"""
