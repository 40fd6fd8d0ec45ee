"""Durations: what is read, to the millisecond, and what is refused in which words."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import OptionError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (90, 90_000),
        (0.1, 100),
        (0.29, 290),
        (4.35, 4_350),
        (1e-3, 1),
        (1e9, 10**12),
        (Decimal("0.25"), 250),
        (timedelta(days=1, milliseconds=5), 86_400_005),
        ("500ms", 500),
        ("90s", 90_000),
        ("30m", 1_800_000),
        ("1h", 3_600_000),
        ("1d", 86_400_000),
        ("2w", 1_209_600_000),
        ("1h30m", 5_400_000),
        (" 1h 30 m ", 5_400_000),
        ("1d2h3m4s5ms", 93_784_005),
        ("1.5s", 1_500),
        ("0.1", 100),
        ("300", 300_000),
    ],
)
def test_read(value: Any, expected: int) -> None:
    assert parse_duration(value, "it") == expected
    assert type(parse_duration(value, "it")) is int


@pytest.mark.parametrize(
    "value",
    [
        True,
        None,
        "",
        "m",
        "5 min",
        "1H",
        "1h30",
        "30m1h",
        "1m1m",
        "1e3s",
        "--5",
        "-",
        "٣s",
        "5s5",
        [5],
        float("nan"),
        float("inf"),
        b"5s",
    ],
)
def test_no_duration(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^job 'export': option 'jitter' must be a duration") as caught:
        parse_duration(value, "job 'export': option 'jitter'")
    assert str(caught.value).endswith(f"not {value!r}")


@pytest.mark.parametrize("value", [1 / 3, 0.0001, "0.0001s", timedelta(microseconds=1500)])
def test_not_whole_milliseconds(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^it must be a whole number of milliseconds, not .*; round it$"):
        parse_duration(value, "it")


@pytest.mark.parametrize("value", [-60, "-60s", "-1m", timedelta(minutes=-1), "- 60"])
def test_below_zero_only_where_allowed(value: Any) -> None:
    assert parse_duration(value, "it", negative=True) == -60_000
    with pytest.raises(OptionError, match=r"^it must not be below zero"):
        parse_duration(value, "it")
