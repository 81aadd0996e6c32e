"""What does the cache cost on a GPU, and what do its kernels reach?

settings ─┬─ kernels   rows pooled and updated: our kernels, torch's, FBGEMM's         against the copy bandwidth
          ├─ steps     a whole DLRM step: cached, over 1, 2, 4 servers                  against all rows in memory
          ├─ appetite  planner, preparation, stores                                     against steps a second
          └─ trace     ten steps as a picture
                └──> Results (results.json, written after every part) ──report──> tables.md, README
"""
