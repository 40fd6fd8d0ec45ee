"""What a store lets a job ask for, decided as a scheduler does at its start, before any claim."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_anarchon.backends.base import Traits
from celery_anarchon.entries import JobFactory
from celery_anarchon.errors import OptionError


def planned(traits: Traits, every: float = 60, **options: Any) -> Any:
    """The job ``export`` with these job options, on a store with these traits."""
    factory = JobFactory(Celery("app", set_as_current=False), traits)
    return factory.job(factory.entry("export", {"task": "t", "schedule": every, "options": {"anarchon": options}}))


def plans_within(traits: Traits, seconds: float) -> None:
    """The plan keeps to slots that the store surely remembers: *seconds*, its horizon."""
    assert traits.horizon == seconds * 1000
    half = seconds / 2
    for options in ({"max_late": seconds}, {"max_late": half, "jitter": half}):
        with pytest.raises(
            OptionError, match=rf"'export'.*must be shorter than .+ remembers a claim \({seconds:g} s\)"
        ):
            planned(traits, 3_600, **options)
    job = planned(traits, 3_600, max_late=half, jitter=half - 0.1)
    assert job.options.max_late + job.options.jitter < traits.horizon
