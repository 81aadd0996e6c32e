"""Readers, the lookahead loader, and the `python -m data` tools. Imports `bagpipe` only; never torch.

    avazu-csv ──┐                   worker processes                 batcher thread
    criteo-tsv ─┤
    csv ────────┤
    huggingface ┤
    mlperf-npz ─┤
    movielens ──┼─ Source: segments ─> blocks ─read─> Columns ─> rows in order ─> Batch ─> bounded queue ─> consumer
    parquet ────┤                  (bounded in flight)
    synthetic ──┤
    tfrecord ───┘

A *segment* is what a source can open at random: a byte range, a row group, a whole gzip file. Its *blocks* come in
order. `open_source` makes a source from the configuration, `LookaheadLoader` serves its rows as batches:

    with LookaheadLoader(open_source(config.data, seed=0), batch_size=1024) as batches:
        for batch in batches: ...

    formats         name -> Source: criteo, avazu, csv (csv_layout, csv_lines), mlperf (npy_files),
                    movielens (movielens_genres), parquet and huggingface (arrow_files), synthetic,
                    tfrecord (tf_example)
    stream          data that grows, and its segments as they arrive: followed_folder (folder_listing),
                    kafka_topic (topic_order, topic_arrivals, kafka_client)
    text_files      blocks of whole lines; delimited, number_parsing, hashing: columns of a block
    arrow_columns   Arrow tables as columns; column_rules: which; arrow_numbers: numbers in texts; clock: times;
                    partitions: columns of folders
    string_ids      strings as ids: string_hash, string_dictionary, dictionary_builder; log_buckets: numbers as ids
    checked_read    a block without the rows that the loss is not defined for; bad_row_limit: too many malformed
    narrowed        a source with some of its columns
    columns         parsed rows; schema_file: the schema TOML
    row_stage   a loader's stage: rows are admitted by their uses, and expire
    row_order       epochs, permutations, positions; shuffle_buffer: the rows of several blocks, mixed
    synthetic_options, synthetic_labels, zipf, criteo_skew: made-up data; criteo_writer, columnar_writer: written data
    conversion      a folder of written data, by several processes; conversion_manifest: what is finished;
                    conversion_state refuses a folder that is not
    next_use_writer next uses of rows, written beside the ids: next_use_files gives the ids, next_use_sort finds them
                    (spill_file: on disk); next_use_mark: of which order; next_use_folder: folders of parts;
                    next_use_source reads them, next_use_batches turns them into batch numbers
    cli             `python -m data`; testing: the conformance suite of readers
"""

from __future__ import annotations

from data.formats import open_source
from data.loader import LoaderStatistics, LookaheadLoader, open_loader

__all__ = ["LoaderStatistics", "LookaheadLoader", "open_loader", "open_source"]
