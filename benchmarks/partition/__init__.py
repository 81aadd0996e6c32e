"""Search time of the partitioner and quality of its partitions. See README.md."""
