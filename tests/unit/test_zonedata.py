"""Which data slots are read from: told apart by what it says, and chosen before anything is read."""

from __future__ import annotations

import importlib.resources
import os
import subprocess
import sys
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tzdata

from celery_anarchon import zonedata
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.solar import Solar
from celery_anarchon.timetable import At, Interval, cron_from_text
from celery_anarchon.wire import parse_time
from celery_anarchon.zonedata import as_text, differing, disagreements, fingerprints, zones_of

NOW = parse_time("2026-03-01T12:00Z")
DAY = 86_400_000


def packaged_file(zone: str) -> bytes:
    return importlib.resources.files("tzdata").joinpath("zoneinfo", *zone.split("/")).read_bytes()


TROLL = "Antarctica/Troll"
"""A zone of which no other test keeps an object."""


@pytest.fixture
def hosts_troll(tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    """Puts a file in the place of the system's."""
    before = zoneinfo.TZPATH
    file = tmp_path / TROLL
    file.parent.mkdir()

    def put(content: bytes) -> None:
        file.write_bytes(content)
        zoneinfo.ZoneInfo.clear_cache(only_keys=[TROLL])

    zoneinfo.reset_tzpath(to=(tmp_path,))
    yield put
    zoneinfo.reset_tzpath(to=before)
    zoneinfo.ZoneInfo.clear_cache(only_keys=[TROLL])


# --- which zones ------------------------------------------------------------------------------------------------------


def test_the_zones_of_a_schedule() -> None:
    schedule = [
        cron_from_text("0 3 * * *", "Europe/Paris"),
        cron_from_text("*/5 * * * *", "Europe/Paris"),
        cron_from_text("0 3 * * *", "UTC"),
        Interval(60_000),
        At(NOW),
    ]
    assert zones_of(schedule) == {"Europe/Paris", "UTC"}
    assert zones_of([*schedule, Solar("sunset", 48.8566, 2.3522)]) == {"Europe/Paris", "UTC", "ephem"}
    assert zones_of([]) == set()


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_one_day_has_one_fingerprint() -> None:
    zones = {"Europe/Paris", "America/New_York", "UTC"}
    found = fingerprints(zones, NOW)
    assert list(found) == ["America/New_York", "Europe/Paris", "UTC"]
    assert len(set(found.values())) == 3
    assert all(len(value) == 8 and int(value, 16) >= 0 for value in found.values())
    start = NOW // DAY * DAY
    assert fingerprints(zones, start) == fingerprints(zones, start + DAY - 1) == found


def test_it_stands_for_the_changes_of_the_next_400_days() -> None:
    march = parse_time("2026-03-29T00:00Z")
    # A change leaves the span on the day after it: until then it is still to come, or was today.
    assert fingerprints({"Europe/Paris"}, march) == fingerprints({"Europe/Paris"}, march - DAY)
    assert fingerprints({"Europe/Paris"}, march) != fingerprints({"Europe/Paris"}, march + DAY)
    assert (
        fingerprints({"Europe/Paris"}, march)["Europe/Paris"] != fingerprints({"Europe/London"}, march)["Europe/London"]
    )
    # The last Sunday of March 2027 comes into view 400 days before it.
    comes = parse_time("2027-03-28T00:00Z") - 400 * DAY
    assert fingerprints({"Europe/Paris"}, comes) != fingerprints({"Europe/Paris"}, comes + DAY)


def test_zones_that_say_the_same_are_the_same() -> None:
    found = fingerprints({"Europe/Paris", "Europe/Berlin", "Asia/Tokyo", "Asia/Seoul"}, NOW)
    assert found["Europe/Paris"] == found["Europe/Berlin"]
    assert found["Asia/Tokyo"] == found["Asia/Seoul"]


def test_the_version_of_the_files_does_not_count(hosts_troll: Callable[[bytes], None]) -> None:
    content = packaged_file(TROLL)
    # The version byte of both headers: what a newer compiler writes.
    newer = content.replace(b"TZif2", b"TZif3")
    assert newer != content
    hosts_troll(content)
    packages = fingerprints({TROLL}, NOW)
    hosts_troll(newer)
    assert fingerprints({TROLL}, NOW) == packages


def test_what_the_files_say_counts(hosts_troll: Callable[[bytes], None]) -> None:
    zones = {TROLL, "Asia/Tokyo", "UTC"}
    hosts_troll(packaged_file(TROLL))
    mine = fingerprints(zones, NOW)
    hosts_troll(packaged_file("Africa/Algiers"))  # as if it had given up its two hours
    others = fingerprints(zones, NOW)
    assert differing(mine, others) == [TROLL]


def test_only_zones_that_both_use_can_differ() -> None:
    assert differing({"A": "1", "B": "2", "C": "3"}, {"B": "2", "C": "4", "D": "5"}) == ["C"]
    assert differing({}, {"A": "1"}) == []


def test_what_solar_slots_are_computed_with() -> None:
    found = fingerprints({"ephem"}, NOW)
    assert found == fingerprints({"ephem"}, NOW + 1)
    assert len(found["ephem"]) == 8


def test_an_unknown_zone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Mars/Base"):
        fingerprints({"Mars/Base"}, NOW)


# --- what beats show each other ---------------------------------------------------------------------------------------


def test_the_text_of_a_beat() -> None:
    text = as_text({"Europe/Paris": "00ff00ff", "Etc/GMT+5": "12345678"}, NOW)
    assert text == "20513 Etc/GMT+5=12345678 Europe/Paris=00ff00ff"
    assert disagreements(text, text) == []
    assert disagreements(text, as_text({"Europe/Paris": "00ff00fe"}, NOW)) == ["Europe/Paris"]
    assert disagreements(text, as_text({"Etc/GMT+5": "0", "Europe/Paris": "0"}, NOW)) == ["Etc/GMT+5", "Europe/Paris"]


def test_nothing_is_said_about_two_days_or_about_nothing() -> None:
    mine = as_text({"Europe/Paris": "1"}, NOW)
    for other in (as_text({"Europe/Paris": "2"}, NOW + DAY), "", as_text({}, NOW), "something of a later release"):
        assert disagreements(mine, other) == disagreements(other, mine) == []


# --- the package's data -----------------------------------------------------------------------------------------------

PROBE = """
import zoneinfo
from zoneinfo import ZoneInfo
from celery import Celery
from celery.schedules import crontab
from celery_anarchon import cron
from celery_anarchon.schedules import timetable_of
from celery_anarchon.zonedata import packaged

zone = ZoneInfo("Europe/Paris")
app = Celery(set_as_current=False, timezone="Europe/Paris")
named, plain = cron("0 3 * * *", timezone=zone), crontab(hour=3, minute=0, app=app)
own = crontab(hour=3, minute=0)
own.tz = zone
app.timezone, plain.tz
july = 1782864000000


def hours():
    return [(timetable_of(each, job="j", app=app).next(july) - july) // 3600000 for each in (named, plain, own)]


before = hours()
release = packaged()
paris = ZoneInfo("Europe/Paris")
assert packaged() == release
assert ZoneInfo("Europe/Paris") is paris
print(before, hours(), zoneinfo.TZPATH, release)
"""


def test_packaged(tmp_path: Path) -> None:
    """Whatever was made before: a schedule's zone is read anew, by its name."""
    (tmp_path / "Europe").mkdir()
    (tmp_path / "Europe" / "Paris").write_bytes(packaged_file("Asia/Tokyo"))
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONTZPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"[18, 18, 18] [1, 1, 1] () {tzdata.IANA_VERSION}\n"


def test_packaged_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tzdata", None)
    searched = list(zoneinfo.TZPATH)
    with pytest.raises(ConfigurationError, match="'anarchon_packaged_tzdata' needs the package: pip install tzdata"):
        zonedata.packaged()
    assert list(zoneinfo.TZPATH) == searched
