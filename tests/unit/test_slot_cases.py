"""Every case of ``tests/data/slot_cases.json``, through the door that users come in by."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery
from celery.schedules import crontab, solar

from celery_anarchon.oracle import expected_cron, expected_interval
from celery_anarchon.ownschedules import at, cron, every
from celery_anarchon.schedules import timetable_of
from celery_anarchon.timetable import Timetable

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "data" / "slot_cases.json").read_text())
NEW_SPELLING = {"ct-month-names", "ct-dow-mar-is-wed"}
"""Names of months in a crontab: Celery 5.5 and later read them."""
UNREAD = [case for case in CASES if case["id"] in NEW_SPELLING and celery.VERSION < (5, 5)]
RUN = [case for case in CASES if case not in UNREAD]
DAY = 86_400_000


def millis(text: str) -> int:
    """Floored, as every `after` is."""
    text = text.replace("Z", "+00:00")
    whole, dot, rest = text.partition(".")
    if dot:
        # Python 3.10 reads three or six digits only.
        fraction, sign, zone = rest.partition("+")
        text = f"{whole}.{fraction.ljust(6, '0')}{sign}{zone}"
    return (datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(milliseconds=1)


def timetable(case: dict[str, Any]) -> Timetable:
    definition = case["definition"]
    schedule: Any
    if case["kind"] == "crontab":
        schedule = crontab(**definition)
    elif case["kind"] == "cron":
        schedule = cron(definition, seconds=len(definition.split()) > 5)
    elif case["kind"] == "interval":
        schedule = every(definition["every"], offset=definition["offset"])
    elif case["kind"] == "solar":
        schedule = solar(**definition)
    else:
        schedule = at(definition["at"])
    return timetable_of(schedule, job=case["id"], app=Celery(set_as_current=False, timezone=case["timezone"]))


def test_no_case_is_left_out() -> None:
    assert Counter(case["kind"] for case in CASES) == {"cron": 96, "crontab": 61, "interval": 20, "at": 9, "solar": 13}
    assert len(RUN) + len(UNREAD) == len(CASES)
    assert len({case["id"] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", RUN, ids=lambda case: case["id"])
def test_slots(case: dict[str, Any]) -> None:
    rule, expected = timetable(case), [millis(slot) for slot in case["expect"]]
    after = millis(case["after"])

    found, instant = [], after
    for _ in expected:
        following = rule.next(instant)
        assert following is not None
        found.append(following)
        instant = following
    assert found == expected, case["why"]

    assert rule.count(after, expected[-1]) == len(expected)
    assert rule.count(after, expected[-1] - 1) == len(expected) - 1
    for before, slot in zip([after, *expected], expected, strict=False):
        assert rule.next(slot - 1) == slot
        assert rule.last(slot) == slot
        previous = rule.last(slot - 1)
        assert previous == before if before != after else previous is None or previous <= after


@pytest.mark.parametrize(
    "case", [case for case in RUN if case["kind"] in ("crontab", "interval")], ids=lambda c: c["id"]
)
def test_oracle_agrees_with_the_cases(case: dict[str, Any]) -> None:
    expected, after = [millis(slot) for slot in case["expect"]], millis(case["after"])
    definition = case["definition"]
    if case["kind"] == "interval":
        every_ms, offset = round(definition["every"] * 1000), round(definition["offset"] * 1000)
        assert expected_interval(every_ms, offset, after, expected[-1]) == expected
        return
    # The oracle scans minute by minute, so it takes as many slots as lie in three days.
    until = max([slot for slot in expected if slot <= after + 3 * DAY], default=after + DAY)
    schedule = crontab(**definition)
    names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
    found = expected_cron({name: getattr(schedule, name) for name in names}, case["timezone"], after, until)
    assert found == [slot for slot in expected if slot <= until]
