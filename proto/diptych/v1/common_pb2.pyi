import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class PoolRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_ROLE_UNSPECIFIED: _ClassVar[PoolRole]
    POOL_ROLE_PREFILL: _ClassVar[PoolRole]
    POOL_ROLE_DECODE: _ClassVar[PoolRole]
    POOL_ROLE_MIXED: _ClassVar[PoolRole]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
POOL_ROLE_UNSPECIFIED: PoolRole
POOL_ROLE_PREFILL: PoolRole
POOL_ROLE_DECODE: PoolRole
POOL_ROLE_MIXED: PoolRole

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class LedgerPart(_message.Message):
    __slots__ = ("phase", "duration")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    phase: str
    duration: _duration_pb2.Duration
    def __init__(self, phase: _Optional[str] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LatencyLedger(_message.Message):
    __slots__ = ("first", "rest", "time_to_first_token", "total")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    first: _containers.RepeatedCompositeFieldContainer[LedgerPart]
    rest: _containers.RepeatedCompositeFieldContainer[LedgerPart]
    time_to_first_token: _duration_pb2.Duration
    total: _duration_pb2.Duration
    def __init__(self, first: _Optional[_Iterable[_Union[LedgerPart, _Mapping]]] = ..., rest: _Optional[_Iterable[_Union[LedgerPart, _Mapping]]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TransferReport(_message.Message):
    __slots__ = ("lease", "transport", "path", "blocks", "bytes", "reads", "descriptors", "reused_blocks", "digests_verified", "busy", "digest_time", "elapsed")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    REUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_TIME_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    lease: str
    transport: str
    path: str
    blocks: int
    bytes: int
    reads: int
    descriptors: int
    reused_blocks: int
    digests_verified: int
    busy: _duration_pb2.Duration
    digest_time: _duration_pb2.Duration
    elapsed: _duration_pb2.Duration
    def __init__(self, lease: _Optional[str] = ..., transport: _Optional[str] = ..., path: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., reads: _Optional[int] = ..., descriptors: _Optional[int] = ..., reused_blocks: _Optional[int] = ..., digests_verified: _Optional[int] = ..., busy: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., digest_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
