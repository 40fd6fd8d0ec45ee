"""Job options and settings: precedence, relations, and the sentence for each refusal."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

from celery_anarchon import wanted
from celery_anarchon.errors import ConfigurationError, OptionError
from celery_anarchon.model import Coalesce, Traits
from celery_anarchon.options import (
    JOB_OPTIONS,
    WORKER_SIDE,
    JobOptions,
    Kind,
    OptionSources,
    Settings,
    check_defaults,
    check_job_options,
    job_options,
    late_warning,
    scheduler_settings,
)
from celery_anarchon.pace import check_pace
from celery_anarchon.timetable import At, Interval, cron_from_text, zone_of

LEASES = Traits(leases=True, horizon=None, server_time=True, durable=True, any_job_name=True, history_by_age=True)
CLAIMS = Traits(leases=False, horizon=300_000, server_time=False, durable=True, any_job_name=True, history_by_age=False)


def resolved(kind: Kind = Kind.INTERVAL, traits: Traits = LEASES, **sources: dict[str, Any]) -> JobOptions:
    given = OptionSources(**{name: sources.get(name, {}) for name in ("entry", "by_name", "defaults", "settings")})
    return job_options("export", kind, given, traits)


VALUES = {
    "jitter": (5, "jitter", 5_000),
    "timeout": ("90s", "timeout", 90_000),
    "max_late": ("1h", "max_late", 3_600_000),
    "history_size": (7, "history_size", 7),
    "history_ttl": (timedelta(days=2), "history_ttl", 172_800_000),
    "catch_up": ("30m", "catch_up", 1_800_000),
    "coalesce": ("all", "coalesce", Coalesce.ALL),
    "offset": ("auto", "offset", "auto"),
}


@pytest.mark.parametrize("source", ["entry", "by_name", "defaults", "settings"])
@pytest.mark.parametrize("name", VALUES)
def test_each_option_from_each_source(source: str, name: str) -> None:
    value, field, meant = VALUES[name]
    assert getattr(resolved(**{source: {name: value}}), field) == meant


@pytest.mark.parametrize("source", ["entry", "by_name", "defaults", "settings"])
def test_timezone_from_each_source(source: str) -> None:
    assert resolved(Kind.CRON, **{source: {"timezone": "Europe/Paris"}}).timezone == "Europe/Paris"


def test_every_option_of_this_release_is_tried_above() -> None:
    assert set(VALUES) | {"timezone"} == JOB_OPTIONS - WORKER_SIDE


TYPED = {
    Kind.INTERVAL: wanted.EveryOptions,
    Kind.CRON: wanted.CronOptions,
    Kind.AT: wanted.OnceOptions,
}


@pytest.mark.parametrize("kind", TYPED, ids=str)
def test_type_checkers_know_what_each_kind_of_job_takes(kind: Kind) -> None:
    values = {name: value for name, (value, _, _) in VALUES.items()}
    values |= {
        "timezone": "Europe/Paris",
        "overlap": "skip",
        "max_attempts": 1,
        "queue_timeout": 5,
        "on_unknown": "skip",
    }
    assert set(values) == JOB_OPTIONS
    taken = set()
    for name, value in values.items():
        with suppress(OptionError):
            check_job_options("export", {name: value}, kind, replace(LEASES, follows_runs=True))
            taken.add(name)
    assert taken == set(get_type_hints(TYPED[kind]))


def test_type_checkers_know_all_defaults() -> None:
    assert set(get_type_hints(wanted.DefaultOptions)) == JOB_OPTIONS


def test_precedence() -> None:
    order = ["entry", "by_name", "defaults", "settings"]
    for strongest in range(4):
        sources = {name: {"jitter": rank + 1} for rank, name in enumerate(order) if rank >= strongest}
        assert resolved(**sources).jitter == (strongest + 1) * 1_000


def test_a_default_applies_where_it_can() -> None:
    assert resolved(Kind.CRON, settings={"offset": 5}).offset is None
    assert resolved(Kind.INTERVAL, settings={"timezone": "UTC"}).timezone is None
    assert resolved(traits=CLAIMS, settings={"catch_up": 5}).catch_up is None


@pytest.mark.parametrize(
    ("kind", "traits", "entry", "words"),
    [
        (Kind.INTERVAL, LEASES, {"jiter": 5}, "did you mean 'jitter'?"),
        (Kind.INTERVAL, LEASES, {"jitter": "soon"}, "must be a duration"),
        (Kind.INTERVAL, LEASES, {"jitter": -1}, "below zero"),
        (Kind.INTERVAL, LEASES, {"jitter": True}, "must be a duration"),
        (Kind.INTERVAL, LEASES, {"timeout": 0}, "longer than zero"),
        (Kind.INTERVAL, LEASES, {"history_size": 0}, "at least 1"),
        (Kind.INTERVAL, LEASES, {"history_size": 1.5}, "whole number"),
        (Kind.INTERVAL, LEASES, {"history_size": 2**31}, "at most 2147483647"),
        (Kind.INTERVAL, LEASES, {"coalesce": "some"}, '"latest" or "all"'),
        (Kind.INTERVAL, LEASES, {"timezone": "UTC"}, "zone of a crontab"),
        (Kind.CRON, LEASES, {"timezone": 5}, "name of a zone"),
        (Kind.CRON, LEASES, {"offset": 5}, "grid of an interval"),
        (Kind.AT, LEASES, {"offset": 5}, "grid of an interval"),
        (Kind.AT, LEASES, {"timezone": "UTC"}, "zone of a crontab"),
        (Kind.INTERVAL, LEASES, {"overlap": "skip"}, "worker side"),
        (Kind.INTERVAL, LEASES, {"max_attempts": 2}, "worker side"),
        (Kind.INTERVAL, LEASES, {"queue_timeout": 2}, "worker side"),
        (Kind.INTERVAL, LEASES, {"on_unknown": "skip"}, "worker side"),
        (Kind.INTERVAL, CLAIMS, {"catch_up": 5}, "store with leases"),
        (Kind.INTERVAL, CLAIMS, {"coalesce": "all"}, "store with leases"),
        (Kind.INTERVAL, CLAIMS, {"history_ttl": 5}, "history by age"),
        (Kind.INTERVAL, CLAIMS, {"jitter": 100, "max_late": 200}, "remembers a claim"),
    ],
)
@pytest.mark.parametrize("source", ["entry", "by_name"])
def test_refusals_name_job_option_and_fix(
    kind: Kind, traits: Traits, entry: dict[str, Any], words: str, source: str
) -> None:
    with pytest.raises(OptionError) as caught:
        resolved(kind, traits, **{source: entry})
    text = str(caught.value)
    assert words in text
    assert "'export'" in text
    assert f"'{next(iter(entry))}'" in text
    assert "\n" not in text
    assert isinstance(caught.value, TypeError)


def test_overlap_allow_is_what_happens_anyway() -> None:
    assert resolved(entry={"overlap": "allow"}) == JobOptions()


def test_none_means_not_given() -> None:
    assert resolved(entry={"jitter": None}, settings={"jitter": 3}).jitter == 3_000


@pytest.mark.parametrize("given", [{"jiter": 1}, {"overlap": "skip"}, {"jitter": "x"}])
def test_defaults_are_checked_once_for_all(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(given))):
        check_defaults("setting", given, LEASES)


def test_a_default_that_no_job_can_take_is_refused() -> None:
    with pytest.raises(OptionError, match="store with leases"):
        check_defaults("setting", {"catch_up": 5}, CLAIMS)
    check_defaults("setting", {"offset": 5, "timezone": "UTC", "jitter": 1}, CLAIMS)


def test_options_are_checked_where_they_are_written() -> None:
    check_job_options("export", {"jitter": 5, "offset": "auto", "overlap": "allow"}, Kind.INTERVAL, LEASES)
    with pytest.raises(OptionError, match=r"job 'export': option 'jiter' is not known \(did you mean 'jitter'\?\)"):
        check_job_options("export", {"jiter": 5}, Kind.INTERVAL, LEASES)


def test_a_max_late_below_takeover_warns() -> None:
    text = late_warning("export", JobOptions(max_late=5_000), Settings())
    assert text is not None
    assert "'export'" in text
    assert "40 s" in text
    assert late_warning("export", JobOptions(max_late=40_000), Settings()) is None
    assert late_warning("export", JobOptions(), Settings()) is None


def test_settings_have_defaults_in_proportion() -> None:
    assert scheduler_settings({}, LEASES) == Settings(lease=30_000, heartbeat=10_000, batch=100)
    assert scheduler_settings({"lease": "6s"}, LEASES).heartbeat == 2_000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lease": 5, "heartbeat": 2}, "at most a third of 'anarchon_lease'"),
        ({"lease": 0}, "'anarchon_lease' must be longer than zero"),
        ({"lease": 0.5}, "at least 1 s"),
        ({"lease": "five"}, "must be a duration"),
        ({"batch": 0}, "at least 1"),
        ({"leese": 3}, "did you mean 'anarchon_lease'?"),
        ({"shadow": True}, "does not have yet"),
        ({"one_step": "yes"}, 'must be "auto", True or False'),
    ],
)
def test_wrong_settings(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        scheduler_settings(given, LEASES)
    assert words in str(caught.value)


def test_a_lease_is_refused_where_there_are_none() -> None:
    with pytest.raises(OptionError, match="only takes claims"):
        scheduler_settings({"lease": 30}, CLAIMS)


# --- stores that only take claims -------------------------------------------------------------------------------------


def test_on_a_store_without_leases_max_late_has_a_default() -> None:
    assert resolved(traits=CLAIMS).max_late == 60_000
    assert resolved(traits=CLAIMS, settings={"max_late": 20}).max_late == 20_000
    assert resolved().max_late is None


@pytest.mark.parametrize(
    ("entry", "horizon", "numbers"),
    [
        ({"jitter": 240}, 300_000, "300 s.*300 s"),
        ({"max_late": 300}, 300_000, "300 s.*300 s"),
        ({}, 60_000, "60 s.*60 s"),
        ({"jitter": 10, "max_late": 230}, 240_000, "240 s.*240 s"),
    ],
)
def test_what_is_asked_for_later_than_a_claim_is_remembered_is_refused(
    entry: dict[str, Any], horizon: int, numbers: str
) -> None:
    with pytest.raises(OptionError, match=f"job 'export'.*{numbers}"):
        resolved(traits=replace(CLAIMS, horizon=horizon), entry=entry)
    resolved(traits=replace(CLAIMS, horizon=horizon + 1), entry=entry)
    resolved(traits=replace(CLAIMS, horizon=None), entry=entry)


def test_a_history_shorter_than_the_memory_of_claims_is_refused() -> None:
    traits = replace(CLAIMS, history_by_age=True, history_ttl_above=300_000)
    with pytest.raises(OptionError, match=r"'history_ttl'.*300 s.*longer.*300 s"):
        resolved(traits=traits, entry={"history_ttl": 300})
    assert resolved(traits=traits, entry={"history_ttl": 301}).history_ttl == 301_000


NOON = 1_795_953_600_000


@pytest.mark.parametrize(
    ("timetable", "gap"), [(Interval(60_000), 60), (cron_from_text("*/5 8 * * *", zone_of("UTC")), 300)]
)
def test_jitter_as_long_as_the_gap_is_refused_where_order_counts(timetable: Any, gap: int) -> None:
    traits = replace(CLAIMS, horizon=None, any_order=False)
    with pytest.raises(OptionError, match=f"job 'export'.*'jitter'.*{gap} s.*{gap} s"):
        check_pace("export", JobOptions(jitter=gap * 1_000), timetable, traits, NOON)
    check_pace("export", JobOptions(jitter=gap * 1_000 - 1), timetable, traits, NOON)
    check_pace("export", JobOptions(jitter=gap * 1_000), timetable, CLAIMS, NOON)
    check_pace("export", JobOptions(jitter=gap * 1_000), At(NOON + 1), traits, NOON)


def test_more_slots_than_claims_are_kept_is_refused() -> None:
    traits = replace(CLAIMS, horizon=240_000, claims_kept=300)
    check_pace("export", JobOptions(), Interval(1_000), traits, NOON)
    with pytest.raises(OptionError, match=r"'export'.*600 slots in 300 s.*300 claims.*max_size"):
        check_pace("export", JobOptions(), Interval(500), traits, NOON)
    with pytest.raises(OptionError, match=r"'export'.*5 slots in 300 s.*4 claims"):
        check_pace(
            "export",
            JobOptions(),
            cron_from_text("0-4 8 * * *", zone_of("UTC")),
            replace(traits, claims_kept=4),
            NOON,
        )
