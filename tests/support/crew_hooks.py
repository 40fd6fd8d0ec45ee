"""The scheduler of :mod:`beat_app`, for the app of :mod:`crew_app`."""

from __future__ import annotations

from beat_app import HookedScheduler

__all__ = ["HookedScheduler"]
