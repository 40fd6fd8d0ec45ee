"""What a user may write for a job, for type checkers.

Belongs here: the words and kinds of values of job options, by what a job is. Does not belong here: what they mean, and
what is refused at run time: :mod:`celery_anarchon.options` reads every value itself, and knows the store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypeAlias, TypedDict
from zoneinfo import ZoneInfo

from celery_anarchon.model import Coalesce, OnUnknown, Overlap

Duration: TypeAlias = float | timedelta | str
"""Seconds, a timedelta, or text such as ``"1h30m"``."""


class AnyStore(TypedDict, total=False):
    """Options of any job on any store. None is as good as not written."""

    jitter: Duration | None
    timeout: Duration | None
    max_late: Duration | None
    history_size: int | None


class ClaimEveryOptions(AnyStore, total=False):
    """Options of ``every`` on a store that only takes claims."""

    overlap: Literal["allow"] | None
    offset: Duration | None


class ClaimCronOptions(AnyStore, total=False):
    """Options of ``cron`` on a store that only takes claims."""

    overlap: Literal["allow"] | None
    timezone: str | ZoneInfo | None


class ClaimDefaults(ClaimEveryOptions, ClaimCronOptions, total=False):
    """Defaults on a store that only takes claims. What no job could take is named, so that a checker names it, too."""

    history_ttl: None
    catch_up: None
    coalesce: None
    max_attempts: None
    queue_timeout: None
    on_unknown: None


class AgedStore(AnyStore, total=False):
    """Options of any job on a store that drops history by age as well."""

    history_ttl: Duration | None


class AgedEveryOptions(AgedStore, total=False):
    """Options of ``every`` on a claim-only store that drops history by age."""

    overlap: Literal["allow"] | None
    offset: Duration | None


class AgedCronOptions(AgedStore, total=False):
    """Options of ``cron`` on a claim-only store that drops history by age."""

    overlap: Literal["allow"] | None
    timezone: str | ZoneInfo | None


class AgedDefaults(AgedEveryOptions, AgedCronOptions, total=False):
    """Defaults on such a store."""

    catch_up: None
    coalesce: None
    max_attempts: None
    queue_timeout: None
    on_unknown: None


class OnceOptions(AgedStore, total=False):
    """Options of any job on a store with leases: all that ``at`` takes."""

    catch_up: Duration | None
    coalesce: Literal["latest", "all"] | Coalesce | None
    max_attempts: int | None
    queue_timeout: Duration | None
    on_unknown: Literal["repeat", "skip"] | OnUnknown | None


class RepeatedOptions(OnceOptions, total=False):
    """What has a next slot, too."""

    overlap: Literal["allow", "skip", "queue_one"] | Overlap | None


class EveryOptions(RepeatedOptions, total=False):
    """Options of ``every``. ``offset`` may be ``"auto"``."""

    offset: Duration | None


class CronOptions(RepeatedOptions, total=False):
    """Options of ``cron``."""

    timezone: str | ZoneInfo | None


class DefaultOptions(EveryOptions, CronOptions, total=False):
    """Defaults of all jobs that can take them."""
