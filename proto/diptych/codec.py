"""Converts plain types to protobuf messages and back. Client and server share one table per pair of types. Pure."""

from collections.abc import Callable
from enum import Enum
from inspect import signature
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, get_args

from google.protobuf.duration_pb2 import Duration

T = TypeVar("T")


class Converter(Protocol):
    """Converts one value in both directions."""

    @property
    def encode(self) -> Callable[[Any], Any]: ...

    @property
    def decode(self) -> Callable[[Any], Any]: ...


class Pair(NamedTuple):
    """A converter made of two functions."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def duration(ns: int) -> Duration:
    message = Duration()
    message.FromNanoseconds(ns)
    return message


def duration_of(seconds: float) -> Duration:
    return duration(round(seconds * 1e9))


def seconds(message: Duration) -> float:
    return message.ToNanoseconds() / 1e9


def _same(value: Any) -> Any:
    return value


SAME = Pair(_same, _same)
TUPLE = Pair(_same, tuple)
NANOSECONDS = Pair(duration, Duration.ToNanoseconds)
SECONDS = Pair(duration_of, seconds)


def repeated(converter: Converter) -> Pair:
    """A converter for tuples."""
    encode, decode = converter.encode, converter.decode
    return Pair(lambda values: [encode(each) for each in values], lambda values: tuple(map(decode, values)))


def enum(plain: type[Enum], wire: Any, prefix: str, *, optional: bool = False) -> Pair:
    """Converts members by name: `Role.PREFILL` is POOL_ROLE_PREFILL. `optional`: unknown values decode to None."""
    values = {each: wire.Value(prefix + each.name) for each in plain}
    members = {value: each for each, value in values.items()}
    return Pair(values.__getitem__, members.get if optional else members.__getitem__)


class _Field(NamedTuple):
    plain: str
    wire: str
    converter: Converter
    is_optional: bool


class Codec(Generic[T]):
    """Converts a dataclass or Struct to a message and back.

    `fields` maps a plain field to (message field, converter); fields with the same name and value need no entry. A
    plain field that the message lacks keeps its default, or is passed to `decode`. None is an absent field, if the
    plain type allows None and the message field has presence.
    """

    def __init__(self, plain: type[T], message: Any, **fields: tuple[str, Converter]) -> None:
        self._plain = plain
        self._message = message
        known = message.DESCRIPTOR.fields_by_name
        self._fields = []
        for name, parameter in signature(plain).parameters.items():
            if name not in fields and name not in known:
                continue
            wire, converter = fields.get(name) or (name, TUPLE if known[name].is_repeated else SAME)
            is_optional = type(None) in get_args(parameter.annotation) and known[wire].has_presence
            self._fields.append(_Field(name, wire, converter, is_optional))

    def encode(self, value: T, **more: Any) -> Any:
        """The message. `more`: message fields that the plain type lacks."""
        for plain, wire, converter, _ in self._fields:
            given = getattr(value, plain)
            if given is not None:
                more[wire] = converter.encode(given)
        return self._message(**more)

    def decode(self, message: Any, **more: Any) -> T:
        """The plain value. `more`: plain fields that the message lacks."""
        for plain, wire, converter, is_optional in self._fields:
            is_absent = is_optional and not message.HasField(wire)
            more[plain] = None if is_absent else converter.decode(getattr(message, wire))
        return self._plain(**more)
