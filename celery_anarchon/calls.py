"""What ``every``, ``cron`` and ``at`` of an Anarchon take, by its store, for type checkers.

Belongs here: signatures. They are attributes that look at the store's type, and no overloads: so a checker says which
option is wrong, not that no variant fits. Does not belong here: anything that runs (:mod:`celery_anarchon.app`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, overload

from celery_anarchon.backends.base import AgedBackend, ClaimBackend, LeaseBackend
from celery_anarchon.wanted import (
    AgedCronOptions,
    AgedEveryOptions,
    AgedStore,
    AnyStore,
    ClaimCronOptions,
    ClaimEveryOptions,
    CronOptions,
    Duration,
    EveryOptions,
    OnceOptions,
)

if TYPE_CHECKING:
    # Python 3.10 has none, and nobody needs it when the code runs.
    from typing_extensions import Unpack

_StoreT = TypeVar("_StoreT", covariant=True)


class StandsOn(Protocol[_StoreT]):
    """An Anarchon on such a store."""

    @property
    def backend(self) -> _StoreT: ...


class EveryOnLeases(Protocol):
    def __call__(
        self,
        name: str,
        interval: Duration,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **job: Unpack[EveryOptions],
    ) -> None: ...


class EveryOnAged(Protocol):
    def __call__(
        self,
        name: str,
        interval: Duration,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **job: Unpack[AgedEveryOptions],
    ) -> None: ...


class EveryOnClaims(Protocol):
    def __call__(
        self,
        name: str,
        interval: Duration,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **job: Unpack[ClaimEveryOptions],
    ) -> None: ...


class CronOnLeases(Protocol):
    def __call__(
        self,
        name: str,
        text: str,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        seconds: bool = False,
        **job: Unpack[CronOptions],
    ) -> None: ...


class CronOnAged(Protocol):
    def __call__(
        self,
        name: str,
        text: str,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        seconds: bool = False,
        **job: Unpack[AgedCronOptions],
    ) -> None: ...


class CronOnClaims(Protocol):
    def __call__(
        self,
        name: str,
        text: str,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        seconds: bool = False,
        **job: Unpack[ClaimCronOptions],
    ) -> None: ...


class AtOnLeases(Protocol):
    def __call__(
        self,
        name: str,
        when: datetime | str,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **job: Unpack[OnceOptions],
    ) -> None: ...


class AtOnAged(Protocol):
    def __call__(
        self,
        name: str,
        when: datetime | str,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **job: Unpack[AgedStore],
    ) -> None: ...


class AtOnClaims(Protocol):
    def __call__(
        self,
        name: str,
        when: datetime | str,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **job: Unpack[AnyStore],
    ) -> None: ...


_OnLeases = TypeVar("_OnLeases", covariant=True)
_OnAged = TypeVar("_OnAged", covariant=True)
_OnClaims = TypeVar("_OnClaims", covariant=True)


class ByStore(Generic[_OnLeases, _OnAged, _OnClaims]):
    """An attribute of an Anarchon that is one of three, by its store."""

    @overload
    def __get__(self, instance: StandsOn[LeaseBackend], owner: Any = ...) -> _OnLeases: ...
    @overload
    def __get__(self, instance: StandsOn[AgedBackend], owner: Any = ...) -> _OnAged: ...
    @overload
    def __get__(self, instance: StandsOn[ClaimBackend], owner: Any = ...) -> _OnClaims: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise NotImplementedError


Every: TypeAlias = ByStore[EveryOnLeases, EveryOnAged, EveryOnClaims]
Cron: TypeAlias = ByStore[CronOnLeases, CronOnAged, CronOnClaims]
At: TypeAlias = ByStore[AtOnLeases, AtOnAged, AtOnClaims]
