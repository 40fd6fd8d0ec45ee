"""How claims are stored: the names of the ways, their options, and which words a user may write for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict

from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis

OFFERED = {"redis": ("lease", "stream-id", "idmp", "script"), "valkey": ("lease", "stream-id", "script")}

LONGEST_DURATION: Millis = 86_400_000
LARGEST_SIZE = 10_000
"""What the server admits for IDMP."""


# --- as type checkers know them ---------------------------------------------------------------------------------------


class _Lease(TypedDict):
    name: Literal["lease"]


class _StreamId(TypedDict):
    name: Literal["stream-id"]


class _ScriptName(TypedDict):
    name: Literal["script"]


class _Script(_ScriptName, total=False):
    window: float | timedelta | str


class _IdmpName(TypedDict):
    name: Literal["idmp"]


class _Idmp(_IdmpName, total=False):
    duration: float | timedelta | str
    max_size: int


LeaseStrategy: TypeAlias = Literal["lease"] | _Lease
ValkeyClaimStrategy: TypeAlias = Literal["stream-id", "script"] | _StreamId | _Script
RedisClaimStrategy: TypeAlias = Literal["idmp"] | _Idmp | ValkeyClaimStrategy
ValkeyStrategy: TypeAlias = LeaseStrategy | ValkeyClaimStrategy
RedisStrategy: TypeAlias = LeaseStrategy | RedisClaimStrategy

# --- as they are read -------------------------------------------------------------------------------------------------


def _span(value: Any, what: str) -> Millis:
    span = parse_duration(value, what)
    if span < 1_000:
        raise ConfigurationError(f"{what}={value!r}: give at least a second, such as 300 or '5m'")
    return span


def _duration(value: Any, what: str) -> Millis:
    span = _span(value, what)
    if span % 1_000 or span > LONGEST_DURATION:
        raise ConfigurationError(f"{what}={value!r}: the server takes whole seconds, a day at most")
    return span


def _size(value: Any, what: str) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        raise ConfigurationError(f"{what}={value!r}: give a number of claims from 1 to {LARGEST_SIZE}")
    return value


OPTIONS: Mapping[str, Mapping[str, tuple[Callable[[Any, str], int], int]]] = {
    "lease": {},
    "stream-id": {},
    "idmp": {"duration": (_duration, 300_000), "max_size": (_size, 1_000)},
    "script": {"window": (_span, 300_000)},
}
"""Strategy -> its options: how one is read, and its default. Spans are milliseconds once they are read."""

ALL_OPTIONS = frozenset(name for options in OPTIONS.values() for name in options)


def read_strategy(value: Any, product: str) -> tuple[str, dict[str, int]]:
    """The name and the options of what was given as ``strategy=...``: a name, or a mapping with ``name``.

    :raises ConfigurationError: the text names what is wrong and what there is.
    """
    given = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = given.pop("name", None)
    offered = OFFERED[product]
    if name == "idmp" and product == "valkey":
        raise ConfigurationError(
            "strategy 'idmp' needs Redis 8.6 or newer, and Valkey has nothing like it: use 'script'"
        )
    if name not in offered:
        choose = ", ".join(repr(one) for one in offered)
        raise ConfigurationError(f"strategy={value!r}: there is no such strategy for {product}; choose {choose}")
    known = OPTIONS[name]
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise ConfigurationError(f"strategy {name!r} {takes}, and was given {', '.join(unknown)}")
    return name, {
        option: default if given.get(option) is None else reader(given[option], option)
        for option, (reader, default) in known.items()
    }


def with_options(strategy: Any, options: Mapping[str, Any]) -> Any:
    """*strategy* with the options that a URL names beside it."""
    if not options:
        return strategy
    given = dict(strategy) if isinstance(strategy, Mapping) else {"name": strategy}
    for option in options:
        if option in given:
            raise ConfigurationError(f"option {option!r} is given twice")
    return {**given, **options}


def in_words(text: str) -> str:
    """``script window=300000`` as people write it: ``'script' (window 300 s)``."""
    name, *options = text.split(" ")
    said = []
    for option in options:
        label, _, value = option.partition("=")
        span = label in ("window", "duration") and value.isdecimal()
        said.append(f"{label} {int(value) / 1000:g} s" if span else f"{label} {value}")
    return f"{name!r} ({', '.join(said)})" if said else repr(name)
