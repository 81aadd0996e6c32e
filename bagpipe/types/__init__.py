"""Records that several rooms share: batch, batch_identity, schema, labels, model_inputs, shard_level; functions of ids.

row_record: words of a stored row, by number type and row optimizer, for schema.
splitmix64: the mix of ids, and the buckets of hashed tables; table_key: keys of a table's random words.
"""
