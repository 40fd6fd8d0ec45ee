"""What this beat and the store know of each other: first sights of jobs, the presence of beats, what to keep.

Does not belong here: anything about a single slot's claim.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Mapping, Sequence

from celery_anarchon import events, slots
from celery_anarchon.agenda import Watched
from celery_anarchon.backends.base import Beat, ClaimBackend, Keep, LeaseBackend, Registration, Sighting
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.job import Job
from celery_anarchon.journal import reach
from celery_anarchon.model import Millis, Terms
from celery_anarchon.options import Settings
from celery_anarchon.skew import FleetClock
from celery_anarchon.zonedata import as_text, disagreements, fingerprints, zones_of

TIDY_BATCH = 500

LIVES = 3
"""A beat or worker that was not seen for so many heartbeats is not there: it is dead, or cannot reach the store."""

PATIENCE = 6
"""Heartbeats that a fleet may be without workers before it is said."""

DAY: Millis = 86_400_000


class Roster:
    """A beat's standing in its fleet. A claim-only store knows no fleet: what is left there is the history."""

    def __init__(
        self,
        backend: ClaimBackend,
        settings: Settings,
        clock: FleetClock,
        fanout: events.Fanout,
        *,
        owner: str,
        label: str,
        version: str,
    ) -> None:
        self._store = backend
        self._backend = backend if isinstance(backend, LeaseBackend) else None
        self._settings = settings
        self._clock = clock
        self._fanout = fanout
        self._owner = owner
        self._label = label
        self._version = version
        self._schedule = ""
        self._zone_names: frozenset[str] = frozenset()
        self._zones = ""
        self._zones_for: tuple[frozenset[str], Millis] | None = None
        self._named: dict[str, list[str]] = {}
        self._compared = False
        self._touched: dict[str, Watched] = {}
        self._presence_at = clock.monotonic()
        self.others_live = True
        """Whether another beat was seen lately. Until the store was asked, the careful answer."""
        self.place = zlib.crc32(owner.encode()) / 2**32
        """Where this beat stands among those that live, from 0 to less than 1: all at equal distances. Anywhere, where
        the store knows of no beats."""
        self.part = 1.0
        """How far it is to the next one."""
        self.had_workers = False
        """Whether a worker that asks the store was ever seen. Until then runs end, for the store, when they are sent:
        nobody would settle them."""
        self._needy: tuple[str, ...] = ()
        """Jobs that rely on workers which ask the store."""
        self._looks_left = PATIENCE
        self.agreed = False
        """Whether all living beats have the same schedule."""

    def schedule_is(self, jobs: Mapping[str, Job]) -> None:
        """Note the whole schedule, for its fingerprint: beats that disagree can be told apart."""
        digest = hashlib.sha256()
        for name in sorted(jobs):
            digest.update(f"{name}\0{jobs[name].timetable.key}\0".encode())
        self._schedule = digest.hexdigest()[:16]
        self._zone_names = frozenset(zones_of(job.timetable for job in jobs.values()))
        self._needy = tuple(sorted(name for name, job in jobs.items() if job.options.needs_workers))

    def first_sight(self, jobs: Sequence[Job]) -> list[Registration]:
        """Tell the store that these jobs are scheduled; what it knows of each."""
        if self._backend is not None:
            return self._backend.register([Sighting(job=job.name, fingerprint=job.fingerprint) for job in jobs])
        now = self._clock.wall()
        return [Registration(since=_looking_back(job, now), last=None) for job in jobs]

    def terms_of(self, job: Job) -> Terms | None:
        """What a run of *job* that is claimed now is followed by, if it is: claim and message must say the same."""
        return job.terms if job.options.needs_workers or self.had_workers else None

    @property
    def registers(self) -> bool:
        """Whether the store knows since when a job is scheduled."""
        return self._backend is not None

    def next_at(self) -> float | None:
        """The monotonic time of the next heartbeat."""
        return None if self._backend is None and not self._touched else self._presence_at

    def show_again(self) -> None:
        """Show presence at the next chance, whenever the next heartbeat would be."""
        self._presence_at = self._clock.monotonic()

    def doubt_clock(self) -> None:
        """This host's clock was set: compare it before anything follows from it."""
        self._compared = False
        self.show_again()

    @property
    def in_doubt(self) -> bool:
        """This host's clock has to be compared first."""
        return self._backend is not None and not self._compared

    def show_presence(self) -> bool:
        """Once a heartbeat: say that this beat lives, look who else does, and compare clocks. True: slots are judged by
        another clock from now on, or by nobody here."""
        if self._clock.monotonic() < self._presence_at:
            return False
        if self._backend is None:
            # Nobody looks for lapsed claims here, which is when the history is tidied elsewhere.
            self.tidy()
            self._presence_at = self._clock.monotonic() + self._settings.heartbeat / 1000
            return False
        if not self._compared:
            # Before anybody is told of it: what the others read as right keeps them from sending.
            self._clock.compare(self._backend.now)
        me = Beat(
            owner=self._owner,
            label=self._label,
            version=self._version,
            skew=self._clock.skew,
            schedule=self._schedule,
            zones=self._zone_data(self._clock.store_time()),
        )
        backend = self._backend
        self._clock.compare(lambda: backend.beat_seen(me))
        living = backend.beats(within=LIVES * self._settings.heartbeat)
        others = [beat for beat in living if beat.owner != self._owner]
        self.others_live = bool(others)
        owners = sorted({self._owner, *(beat.owner for beat in living)})
        self.place, self.part = owners.index(self._owner) / len(owners), 1 / len(owners)
        if isinstance(backend, RunBackend):
            self._look_for_workers(backend)
        self.agreed = all(beat.schedule == self._schedule for beat in living)
        self._compare_zones(living)
        self._presence_at = self._clock.monotonic() + self._settings.heartbeat / 1000
        self._compared = True
        if self._clock.decide((beat.skew, beat.seen) for beat in others):
            # What this beat tells of its clock is old now.
            self.show_again()
            return True
        return False

    def _look_for_workers(self, backend: RunBackend) -> None:
        if not self.had_workers:
            self.had_workers = backend.ever_had_workers()
        if self._needy and self._looks_left:
            # Not at the first look: workers and beats are often started together.
            self._looks_left = 0 if backend.workers(within=LIVES * self._settings.heartbeat) else self._looks_left - 1
            if self._looks_left == 1:
                self._looks_left = 0
                self._fanout.emit(events.NoWorkers(jobs=self._needy))

    def _zone_data(self, now: Millis) -> str:
        """What this beat's zone data says: worked out once a day, and when other zones come into use."""
        wanted = (self._zone_names, now // DAY)
        if self._zones_for != wanted:
            self._zones, self._zones_for = as_text(fingerprints(self._zone_names, now), now), wanted
        return self._zones

    def _compare_zones(self, living: Sequence[Beat]) -> None:
        """Name each beat that disagrees about zones, once for each list of them."""
        named: dict[str, list[str]] = {}
        for beat in living:
            found = disagreements(self._zones, beat.zones)
            if beat.owner != self._owner and found:
                named[beat.owner] = found
                if self._named.get(beat.owner) != found:
                    self._fanout.emit(events.ZonesDiffer(label=beat.label, zones=tuple(found)))
        self._named = named

    def leave(self) -> None:
        """This beat stops on purpose."""
        if self._backend is not None:
            self._backend.beat_left(self._owner)

    def touched(self, watched: Watched) -> None:
        """This job has a new record, so an old one may have to go."""
        self._touched[watched.job.name] = watched

    def tidy(self) -> None:
        """Drop what exceeds the history of the jobs touched since the last time."""
        while self._touched:
            some = list(itertools.islice(self._touched.values(), TIDY_BATCH))
            self._store.tidy(
                [
                    Keep(
                        job=watched.job.name,
                        decided=watched.cursor,
                        history_size=watched.job.options.history_size,
                        history_ttl=watched.job.options.history_ttl,
                    )
                    for watched in some
                ]
            )
            for watched in some:
                self._touched.pop(watched.job.name, None)


def _looking_back(job: Job, now: Millis) -> Millis:
    """Where a job begins where the store keeps no first sight: before its latest slot, unless that is too late.

    The slots before that one are neither sent nor noted: others may have sent them, and nobody can tell.
    """
    try:
        last = slots.last_due(job.name, job.timetable, job.options, now)
        if last is None:
            return now
        due = slots.due_time(job.name, job.timetable, job.options, last)
    except Exception:
        # A timetable that fails is told when it is planned, and is one job's trouble.
        return now
    return last if now - due > reach(job) else last - 1
