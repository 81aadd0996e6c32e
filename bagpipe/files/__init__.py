"""Files to read by path or URL: local ones as the system gives them, others through fsspec, range by range.

"days/day_0.tsv"    ──────────────────────────────> open, os.stat, os.scandir
"s3://b/day_0.tsv"  ──fsspec──> RemoteObject: ranges of one version, retried ──> RemoteFile: read-ahead
                                                                          └────> copies to and from local files

version     FileVersion: what tells two contents of a file apart
access      open_file, file_version, is_file, is_folder, list_folder: of paths and URLs alike
data_folder the files of a folder of data and of its Hive partitions, in reading order, and what is left out
compression how a file is compressed, told from its first bytes; the content of gzip and zlib streams
remote      RemoteObject: one version; the errors of clients as one line
remote_file RemoteFile: a stream with read-ahead
transfer    copies between local files and URLs, for mirrors of checkpoints
"""
