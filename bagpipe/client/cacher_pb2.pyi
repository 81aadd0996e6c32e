from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerMessage(_message.Message):
    __slots__ = ("hello", "start", "ack", "leave", "share")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    start: Start
    ack: Ack
    leave: Leave
    share: Share
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., share: _Optional[_Union[Share, _Mapping]] = ...) -> None: ...

class CacherMessage(_message.Message):
    __slots__ = ("welcome", "end", "error", "shared", "rank_batches")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    RANK_BATCHES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    end: End
    error: Error
    shared: Shared
    rank_batches: _containers.RepeatedCompositeFieldContainer[RankBatch]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., shared: _Optional[_Union[Shared, _Mapping]] = ..., rank_batches: _Optional[_Iterable[_Union[RankBatch, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "job_id", "instance", "rank", "world_size", "credits", "settings", "schema")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job_id: str
    instance: str
    rank: int
    world_size: int
    credits: int
    settings: str
    schema: str
    def __init__(self, protocol: _Optional[int] = ..., job_id: _Optional[str] = ..., instance: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., credits: _Optional[int] = ..., settings: _Optional[str] = ..., schema: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("schema", "identity", "file")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    schema: str
    identity: str
    file: SharedFile
    def __init__(self, schema: _Optional[str] = ..., identity: _Optional[str] = ..., file: _Optional[_Union[SharedFile, _Mapping]] = ...) -> None: ...

class SharedFile(_message.Message):
    __slots__ = ("pid", "fd", "num_bytes", "nonce")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    num_bytes: int
    nonce: bytes
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., num_bytes: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Shared(_message.Message):
    __slots__ = ("start", "num_bytes")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_bytes: int
    def __init__(self, start: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("run", "phase", "spec", "max_steps", "first_batch", "next_batch", "watermark", "ended", "reader_state", "known_rows")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BATCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_BATCH_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    READER_STATE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_ROWS_FIELD_NUMBER: _ClassVar[int]
    run: int
    phase: str
    spec: str
    max_steps: int
    first_batch: int
    next_batch: int
    watermark: int
    ended: bool
    reader_state: str
    known_rows: str
    def __init__(self, run: _Optional[int] = ..., phase: _Optional[str] = ..., spec: _Optional[str] = ..., max_steps: _Optional[int] = ..., first_batch: _Optional[int] = ..., next_batch: _Optional[int] = ..., watermark: _Optional[int] = ..., ended: _Optional[bool] = ..., reader_state: _Optional[str] = ..., known_rows: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("run", "watermark")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    run: int
    watermark: int
    def __init__(self, run: _Optional[int] = ..., watermark: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankBatch(_message.Message):
    __slots__ = ("run", "index", "payload")
    RUN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    run: int
    index: int
    payload: bytes
    def __init__(self, run: _Optional[int] = ..., index: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("run", "skipped_rows", "next_batch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BATCH_FIELD_NUMBER: _ClassVar[int]
    run: int
    skipped_rows: int
    next_batch: int
    def __init__(self, run: _Optional[int] = ..., skipped_rows: _Optional[int] = ..., next_batch: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("hello", "piece")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    hello: PlanHello
    piece: Piece
    def __init__(self, hello: _Optional[_Union[PlanHello, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class PlanReply(_message.Message):
    __slots__ = ("welcome", "piece", "error")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    welcome: PlanWelcome
    piece: Piece
    error: Error
    def __init__(self, welcome: _Optional[_Union[PlanWelcome, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class PlanHello(_message.Message):
    __slots__ = ("protocol", "job_id")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job_id: str
    def __init__(self, protocol: _Optional[int] = ..., job_id: _Optional[str] = ...) -> None: ...

class PlanWelcome(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Piece(_message.Message):
    __slots__ = ("kind", "run", "num_bytes", "data")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    kind: int
    run: int
    num_bytes: int
    data: bytes
    def __init__(self, kind: _Optional[int] = ..., run: _Optional[int] = ..., num_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class IndexRequest(_message.Message):
    __slots__ = ("hello", "start", "ack", "share")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    hello: IndexHello
    start: IndexStart
    ack: IndexAck
    share: Share
    def __init__(self, hello: _Optional[_Union[IndexHello, _Mapping]] = ..., start: _Optional[_Union[IndexStart, _Mapping]] = ..., ack: _Optional[_Union[IndexAck, _Mapping]] = ..., share: _Optional[_Union[Share, _Mapping]] = ...) -> None: ...

class IndexReply(_message.Message):
    __slots__ = ("welcome", "part", "end", "error")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    welcome: IndexWelcome
    part: IndexPart
    end: IndexEnd
    error: Error
    def __init__(self, welcome: _Optional[_Union[IndexWelcome, _Mapping]] = ..., part: _Optional[_Union[IndexPart, _Mapping]] = ..., end: _Optional[_Union[IndexEnd, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class IndexHello(_message.Message):
    __slots__ = ("protocol", "settings")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    settings: str
    def __init__(self, protocol: _Optional[int] = ..., settings: _Optional[str] = ...) -> None: ...

class IndexWelcome(_message.Message):
    __slots__ = ("schema", "identity", "file")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    schema: str
    identity: str
    file: SharedFile
    def __init__(self, schema: _Optional[str] = ..., identity: _Optional[str] = ..., file: _Optional[_Union[SharedFile, _Mapping]] = ...) -> None: ...

class IndexStart(_message.Message):
    __slots__ = ("phase", "spec", "tables", "next_batch", "credits", "reader_state", "with_lengths", "with_examples")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_BATCH_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    READER_STATE_FIELD_NUMBER: _ClassVar[int]
    WITH_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WITH_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    phase: str
    spec: str
    tables: _containers.RepeatedScalarFieldContainer[int]
    next_batch: int
    credits: int
    reader_state: str
    with_lengths: bool
    with_examples: bool
    def __init__(self, phase: _Optional[str] = ..., spec: _Optional[str] = ..., tables: _Optional[_Iterable[int]] = ..., next_batch: _Optional[int] = ..., credits: _Optional[int] = ..., reader_state: _Optional[str] = ..., with_lengths: _Optional[bool] = ..., with_examples: _Optional[bool] = ...) -> None: ...

class IndexPart(_message.Message):
    __slots__ = ("index", "payload", "shared", "busy_ns", "waited_ns", "rss_bytes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    WAITED_NS_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    payload: bytes
    shared: Shared
    busy_ns: int
    waited_ns: int
    rss_bytes: int
    def __init__(self, index: _Optional[int] = ..., payload: _Optional[bytes] = ..., shared: _Optional[_Union[Shared, _Mapping]] = ..., busy_ns: _Optional[int] = ..., waited_ns: _Optional[int] = ..., rss_bytes: _Optional[int] = ...) -> None: ...

class IndexEnd(_message.Message):
    __slots__ = ("next_batch",)
    NEXT_BATCH_FIELD_NUMBER: _ClassVar[int]
    next_batch: int
    def __init__(self, next_batch: _Optional[int] = ...) -> None: ...

class IndexAck(_message.Message):
    __slots__ = ("watermark",)
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    watermark: int
    def __init__(self, watermark: _Optional[int] = ...) -> None: ...
