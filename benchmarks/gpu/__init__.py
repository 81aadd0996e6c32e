"""Cost of the cache on a GPU, and throughput of its kernels.

settings ─┬─ kernels   rows pooled and updated: our kernels, torch's, FBGEMM's         against the copy bandwidth
          ├─ steps     a whole DLRM step: cached, over 1, 2, 4 servers                  against all rows in memory
          ├─ feed      planner, preparation, stores                                     against steps a second
          └─ trace     ten steps as a picture
                └──> results ──report──> tables in the README
"""
