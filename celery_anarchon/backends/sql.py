"""The contract on tables, in SQLAlchemy Core, for every SQL store; here its leases, first sights and beats.

A reader's path: :mod:`.sqltables` (tables and statements), :mod:`.sqlclaims` (claims), :mod:`.sqlruns` (runs on their
workers), this module, :mod:`.sqlstore` (opening, calls, and what a dialect says). A dialect's own module is little more
than what :mod:`.sqlstore` asks of it.

Why it is exact. A batch is one transaction that is a *write* transaction from its first statement on, sorted by
(job, slot). The floors of its jobs are read (and, where transactions run side by side, locked) by a statement of their
own before anything else, because a lock taken inside the claiming statement is younger than that statement's view. Each
answer is what a conditional write returned; rows that it did not touch are read afterwards, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from celery_anarchon.backends.base import (
    BEATS_KEPT,
    FINGERPRINTS_KEPT,
    Beat,
    Keep,
    LapsedClaim,
    Registration,
    Sighting,
    Takeover,
    Unusable,
)
from celery_anarchon.backends.sqlclaims import key_of
from celery_anarchon.backends.sqlruns import SqlRuns, rounds
from celery_anarchon.backends.sqlstore import NoTables, chunks
from celery_anarchon.backends.sqltables import LOWEST
from celery_anarchon.model import Millis, RunState

__all__ = ["NoTables", "SqlBackend", "Unusable"]


class SqlBackend(SqlRuns):
    """See the module. Subclasses name themselves, their traits, and what their dialect says."""

    def register(self, sightings: Sequence[Sighting]) -> list[Registration]:
        # Part by part: a beat that starts with 100,000 jobs must not keep the claims of others waiting for seconds.
        return [registration for some in chunks(sightings) for registration in self._register(some)]

    def _register(self, sightings: Sequence[Sighting]) -> list[Registration]:
        jobs = sorted({sighting.job for sighting in sightings})
        with self._writing() as connection:
            self._note_jobs(connection, jobs)
            self._floors(connection, jobs)
            now = self._time(connection)
            sinces = self._sight(connection, sightings, jobs, now)
            lasts: dict[str, Millis | None] = {
                row.job: row.floor if row.newest is None else row.newest
                for row in connection.execute(self._sql.lasts, {"the_jobs": jobs})
            }
        return [
            Registration(since=since, last=lasts[sighting.job])
            for since, sighting in zip(sinces, sightings, strict=True)
        ]

    def _sight(
        self, connection: Connection, sightings: Sequence[Sighting], jobs: Sequence[str], now: Millis
    ) -> list[Millis]:
        known: dict[str, dict[str, tuple[Millis, int]]] = {job: {} for job in jobs}
        for row in connection.execute(self._sql.sights, {"the_jobs": jobs}):
            known[row.job][row.fingerprint] = row.since, row.turn
        changed: set[tuple[str, str]] = set()
        forgotten: set[tuple[str, str]] = set()
        sinces = []
        for sighting in sightings:
            job, fingerprint, of_job = sighting.job, sighting.fingerprint, known[sighting.job]
            latest = max((turn for _, turn in of_job.values()), default=0)
            since, turn = of_job.get(fingerprint, (now, 0))
            sinces.append(since)
            if turn == latest > 0:
                continue
            of_job[fingerprint] = since, latest + 1
            changed.add((job, fingerprint))
            if len(of_job) > FINGERPRINTS_KEPT:
                oldest = min(of_job, key=lambda name: of_job[name][1])
                del of_job[oldest]
                forgotten.add((job, oldest))
        if forgotten:
            rows = [{"the_job": job, "the_fingerprint": fingerprint} for job, fingerprint in sorted(forgotten)]
            connection.execute(self._sql.forget_sight, rows)
        sighted = [
            {"job": job, "fingerprint": fingerprint, "since": since, "turn": turn}
            for job, fingerprint in sorted(changed)
            if fingerprint in known[job]
            for since, turn in (known[job][fingerprint],)
        ]
        if sighted:
            connection.execute(self._sql.sighted, sighted)
        return sinces

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        def read(connection: Connection) -> Iterable[Row[Any]]:
            return connection.execute(self._sql.lapsed, {"now": self._time(connection), "the_limit": max(limit, 0)})

        return [
            LapsedClaim(
                job=row.job,
                slot=row.slot,
                attempt=row.attempt,
                abandoned=row.owner is None and row.state == str(RunState.CLAIMED),
                state=RunState(row.state),
                max_attempts=row.max_attempts,
                reason=row.reason,
            )
            for row in self._look(read)
        ]

    def takeover(self, wishes: Sequence[Takeover]) -> list[int | None]:
        if not wishes:
            return []
        taken: list[int | None] = [None] * len(wishes)
        with self._writing() as connection:
            self._lock_runs(connection, (key_of(wish) for wish in wishes))
            now = self._time(connection)
            for part in rounds(wishes, key_of):
                rows = [(w.job, w.slot, w.from_attempt, w.owner, w.beat, w.lease) for w in part.values()]
                numbers = {key_of(wish): number for number, wish in part.items()}
                for row in self._execute(connection, self._sql.takeover, rows, now=now):
                    taken[numbers[key_of(row)]] = row.attempt
        return taken

    def tidy(self, keeps: Sequence[Keep]) -> int:
        if not keeps:
            return 0
        with self._reading() as connection:
            # Mostly there is nothing to drop: find out without keeping claims waiting.
            if not self._patiently(lambda: self._bounds(connection, keeps)):
                return 0
        with self._writing() as connection:
            jobs = sorted({keep.job for keep in keeps})
            self._note_jobs(connection, jobs)
            self._floors(connection, jobs)
            bounds = self._bounds(connection, keeps)
            if not bounds:
                return 0
            rows = [{"the_job": job, "the_bound": bound} for job, bound in sorted(bounds.items())]
            connection.execute(self._sql.raise_floor, rows)
            return connection.execute(self._sql.drop, rows).rowcount

    def _bounds(self, connection: Connection, keeps: Sequence[Keep]) -> dict[str, Millis]:
        """For each job that has something to drop, the slot up to which it goes."""
        alike: dict[tuple[int, Millis | None], list[tuple[str, Millis]]] = {}
        for keep in keeps:
            alike.setdefault((keep.history_size, keep.history_ttl), []).append((keep.job, keep.decided))
        now = self._time(connection)
        bounds: dict[str, Millis] = {}
        for (size, ttl), rows in alike.items():
            fresh_since = LOWEST if ttl is None else now - ttl
            found = self._execute(connection, self._sql.surplus, sorted(rows), size=size, fresh_since=fresh_since)
            for row in found:
                bound: Millis = row.decided if row.first_stays is None else min(row.decided, row.first_stays - 1)
                if row.oldest is not None and row.oldest <= bound:
                    bounds[row.job] = max(bound, bounds.get(row.job, bound))
        return bounds

    def beat_seen(self, beat: Beat) -> Millis:
        with self._writing() as connection:
            now = self._time(connection)
            connection.execute(self._sql.beat_seen, [{**vars(beat), "seen": now}])
            connection.execute(self._sql.old_beats, {"the_oldest": now - BEATS_KEPT})
        return now

    def beat_left(self, owner: str) -> None:
        with self._writing() as connection:
            connection.execute(self._sql.beat_left, {"the_owner": owner})

    def beats(self, within: Millis) -> list[Beat]:
        rows = self._look(lambda connection: connection.execute(self._sql.beats, {"within": within}))
        return [Beat(**row._mapping) for row in rows]
