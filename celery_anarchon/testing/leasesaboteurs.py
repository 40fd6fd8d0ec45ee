"""Backends that let the wrong one go on, or nobody (L); part of :mod:`.saboteurs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_anarchon.backends.base import (
    Beat,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    Hold,
    LapsedClaim,
    Registration,
    Sighting,
    Takeover,
)
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.model import Answer, Millis, RunState


class SightsAnew(MemoryBackend):
    """L1: the last sighting says since when."""

    def _register(self, space: Any, now: Millis, sighting: Sighting) -> Registration:
        space.sights[sighting.job].pop(sighting.fingerprint, None)
        return super()._register(space, now, sighting)


class KeepsOneFingerprint(MemoryBackend):
    """L1: a job has one schedule at a time."""

    def _register(self, space: Any, now: Millis, sighting: Sighting) -> Registration:
        for other in [name for name in space.sights[sighting.job] if name != sighting.fingerprint]:
            del space.sights[sighting.job][other]
        return super()._register(space, now, sighting)


class LastIsWhatIsLeft(MemoryBackend):
    """L1: what was dropped from the history has never been."""

    def _register(self, space: Any, now: Millis, sighting: Sighting) -> Registration:
        known = super()._register(space, now, sighting)
        return replace(known, last=max(space.runs.get(sighting.job, {}), default=None))


class ListsByName(MemoryBackend):
    """L2: lapsed claims come in the order of their jobs."""

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        return sorted(super().lapsed(1_000_000), key=lambda found: (found.job, found.slot))[:limit]


class ListsWhatIsHeld(MemoryBackend):
    """L2: everything that has a lease is in the list."""

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        with self._locked() as (space, _):
            return [
                LapsedClaim(job=job, slot=slot, attempt=space.runs[job][slot].attempt, abandoned=False)
                for job, slot in sorted(space.leased)[:limit]
            ]


class TakesFromTheList(MemoryBackend):
    """L3: what was in the list is the sweeper's."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        if record is None:
            return None
        record.owner, record.state, record.lease_until = wish.owner, RunState.CLAIMED, now + wish.lease
        space.leased.add((wish.job, wish.slot))
        return wish.from_attempt


class CountsTakeovers(MemoryBackend):
    """L4: each takeover is an attempt."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        attempt = super()._takeover(space, now, wish)
        if attempt is not None:
            record = space.find(wish.job, wish.slot)
            record.attempt += 1
            return int(record.attempt)
        return None


class AbandonsToTheLease(MemoryBackend):
    """L5: abandon says yes, and leaves the slot to its lease."""

    def _abandon(self, space: Any, now: Millis, hold: Hold) -> bool:
        record = space.find(hold.job, hold.slot)
        return record is not None and record.held_by(hold)


class AbandonsByForgetting(MemoryBackend):
    """L5: an abandoned slot is deleted, so that a claim can begin anew."""

    def _abandon(self, space: Any, now: Millis, hold: Hold) -> bool:
        done = super()._abandon(space, now, hold)
        if done:
            del space.runs[hold.job][hold.slot]
            space.leased.discard((hold.job, hold.slot))
        return done


class FirstOwnerStays(MemoryBackend):
    """L6: who won the claim may confirm it, whoever holds it now."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        result = super()._claim(space, now, request)
        if result.answer is Answer.WON:
            vars(space.find(request.job, request.slot)).setdefault("winner", request.owner)
        return result

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        record = space.find(confirmation.job, confirmation.slot)
        if record is not None and vars(record).get("winner") == confirmation.owner:
            confirmation = replace(confirmation, owner=record.owner)
        return super()._confirm(space, now, confirmation)


class AbandonsWhatOthersHold(MemoryBackend):
    """L6: abandon frees the lease, whoever has it."""

    def _abandon(self, space: Any, now: Millis, hold: Hold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is not None and record.state in (RunState.CLAIMED, RunState.RUNNING):
            record.lease_until = now
            return True
        return super()._abandon(space, now, hold)


class RefusesEverybody(MemoryBackend):
    """L7: after a takeover nobody may write."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        attempt = super()._takeover(space, now, wish)
        if attempt is not None:
            record = space.find(wish.job, wish.slot)
            record.held_by = record.ended_by = lambda hold: False
        return attempt


class TakesOnce(MemoryBackend):
    """L8: a takeover asked again finds nothing lapsed."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        mine = record is not None and record.owner == wish.owner and not record.lapsed(now)
        return None if mine else super()._takeover(space, now, wish)


class OneBeatForEachLabel(MemoryBackend):
    """L9: beats are known by their labels."""

    def beats(self, within: Millis) -> list[Beat]:
        return list({beat.label: beat for beat in super().beats(within)}.values())


class NeverLeaves(MemoryBackend):
    """L9: a beat that stops is shown until it is forgotten."""

    def beat_left(self, owner: str) -> None:
        pass


LEASE_SABOTEURS: dict[str, tuple[type[MemoryBackend], ...]] = {
    "L1": (SightsAnew, KeepsOneFingerprint, LastIsWhatIsLeft),
    "L2": (ListsByName, ListsWhatIsHeld),
    "L3": (TakesFromTheList,),
    "L4": (CountsTakeovers,),
    "L5": (AbandonsToTheLease, AbandonsByForgetting),
    "L6": (FirstOwnerStays, AbandonsWhatOthersHold),
    "L7": (RefusesEverybody,),
    "L8": (TakesOnce,),
    "L9": (OneBeatForEachLabel, NeverLeaves),
}
"""Clause -> the backends that break it."""
