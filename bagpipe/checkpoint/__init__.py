"""Checkpoints: the complete state of a job, in one directory, published by one rename. A resumed job repeats its bits.

    lanes ──copies──> Recorder ──rows, dense state──> files ──Part (per rank)──> Manifest ──rename──> folder
                                                                                    └──> Ledger.commit
    folder ──newest whose files are whole──> Manifest ──> dense state, rng           (every rank)
                                                └──> CheckpointRows ──touched, dirty rows──> store     (rank 0)

    <checkpoint.dir>/generation-000007/           one per start of the job; its number is part of the job's token
        step-00000400/                            the state before batch 400 is trained
            manifest.json                         written last; without it the checkpoint does not exist
            part-0000.json                        rank 0's part
            dense-0000.safetensors                parameters, buffers, optimizer, random state
            rows-00000400-0000-000384.npy         rows of 384 bytes that changed since the previous checkpoint
            deleted-00000400-0000.npy             rows that were deleted since then
            dirty-0000.npy                        rows newer than the store's
            full-00000300-000384.npy, …           files of earlier checkpoints that this one builds on, as hard links

The manifest lists every file with its length and XXH3-128 checksum. No file is a pickle.

    mirror                copies of checkpoints behind a URL
    recorder, recorded    copies of a rank's state            writer, publisher    files of one rank, one checkpoint
    journal, row_file     changed, deleted rows, sorted       merge                row files, newest record of each row
    folder, files         generations, links, checksums       manifest, codec      records, as JSON
    folder_lock           which job runs on the folder
    checkpoint_rows, checkpoint_store   by table, as a store  written_rows         rows written recently
    dense_state           the dense part as tensors           recovery, export     into the store; for other programs
    dense_pieces          a divided dense part             optimizer_state      state of optimizers by name
    existing_rows         rows of another job in the store    adoption             such rows as the first checkpoint
    stored_rows           rows of an open store by table  best                 the checkpoint of the best evaluation
    compaction            a checkpoint without some of its rows
"""
