"""A ``beat_schedule`` that notices its own changes, so that a tick need not compare it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from celery import Celery

from celery_anarchon.choice import schedule_setting
from celery_anarchon.clock import Clock


class CountingDict(dict[str, Any]):
    """A dict that lists which of its keys were set or removed since it was last asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._touched: set[str] = set()

    def take_touched(self) -> set[str]:
        """The keys set or removed since the last call."""
        touched, self._touched = self._touched, set()
        return touched

    @property
    def is_touched(self) -> bool:
        return bool(self._touched)

    def _touch(self, keys: Iterable[str]) -> None:
        self._touched.update(keys)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._touch((key,))

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._touch((key,))

    def update(self, *args: Any, **kwargs: Any) -> None:
        changes = dict(*args, **kwargs)
        super().update(changes)
        self._touch(changes)

    def __ior__(self, other: Any) -> CountingDict:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self._touch((key,))
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        key, value = super().popitem()
        self._touch((key,))
        return key, value

    def clear(self) -> None:
        self._touch(list(self))
        super().clear()


def snapshot(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """A picture of the definitions, deep enough to show a change inside an entry's dict, its options included. Of
    tuples, which take a third of what dicts do: it is kept for every job."""
    return {name: _entry_snapshot(definition) for name, definition in definitions.items()}


def _entry_snapshot(definition: Any) -> Any:
    if isinstance(definition, Mapping):
        return (_keys(*definition), *map(_entry_snapshot, definition.values()))
    return copy.copy(definition) if isinstance(definition, (list, set)) else definition


@lru_cache(maxsize=256)
def _keys(*keys: Any) -> tuple[Any, ...]:
    """The head of a mapping's picture, by which it differs from a tuple of the user's: one object for all entries of
    the same keys."""
    return (Mapping, *keys)


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """The names whose definitions differ from the snapshot *before*."""
    gone = {name for name in before if name not in now}
    return gone | {name for name, definition in now.items() if name not in before or _differ(before[name], definition)}


def _differ(before: Any, definition: Any) -> bool:
    try:
        return bool(before != _entry_snapshot(definition))
    except Exception:
        # A value in it cannot be compared: it may be another one.
        return True


class WatchedSchedule:
    """``app.conf.beat_schedule`` as this process changes it.

    Keys set or removed, and a whole new mapping, are seen at the next look; a change inside an entry's dict, or in the
    mapping that was configured at first, by a full compare once every *interval* seconds.
    """

    def __init__(self, app: Celery, interval: float, clock: Clock) -> None:
        self._app = app
        self._interval = interval
        self._clock = clock
        self._given: Mapping[str, Any] = {}
        self._given_before: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._compare_at = 0.0
        self.current = CountingDict()
        self._attach()

    def _attach(self) -> None:
        given = schedule_setting(self._app)
        before, current = snapshot(given), CountingDict(given)
        # Only now, when nothing can fail any more: else half of it would be of the old one.
        self._given, self._given_before, self.current = given, before, current
        self._app.conf.beat_schedule = self.current
        # One picture for both, as long as nothing changes: in most processes that is for ever.
        self._before = self._given_before
        self._compare_at = self._clock.monotonic() + self._interval

    def changed(self) -> set[str]:
        """The names whose definitions changed since the last call. Costs nothing when nothing was touched."""
        if self._app.conf.beat_schedule is not self.current:
            before = self._before
            self._attach()
            return differing(before, self.current)
        names: set[str] = set()
        if self._clock.monotonic() >= self._compare_at:
            self._compare_at = self._clock.monotonic() + self._interval
            self._carry_over()
            names = differing(self._before, self.current)
        if self.current.is_touched:
            names |= self.current.take_touched()
        if names and self._before is self._given_before:
            self._before = dict(self._before)
        for name in names:
            if name in self.current:
                self._before[name] = _entry_snapshot(self.current[name])
            else:
                self._before.pop(name, None)
        return names

    def _carry_over(self) -> None:
        """Bring changes of the mapping that the user still holds into the one that Celery reads."""
        for name in differing(self._given_before, self._given):
            if name in self._given:
                self.current[name] = self._given[name]
            else:
                self.current.pop(name, None)
        self._given_before = snapshot(self._given)
