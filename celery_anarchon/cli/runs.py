"""``celery anarchon status`` and ``history``: what the store knows."""

from __future__ import annotations

import itertools
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_anarchon.app import open_backend, settings_of
from celery_anarchon.backends.base import Beat, ClaimBackend, LeaseBackend
from celery_anarchon.backends.runs import RunBackend, Worker
from celery_anarchon.cli.common import NONE, Schedule, app_of, guarded, json_option, show_json, show_table
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.roster import LIVES
from celery_anarchon.wire import instant, run_json, time_text
from celery_anarchon.zonedata import disagreements


@click.command("status", cls=CeleryCommand)
@json_option
@click.pass_context
@guarded
def status(ctx: click.Context, as_json: bool) -> None:
    """The store, the beats that live, and each job's last and next slot."""
    app = app_of(ctx)
    schedule = Schedule(app)
    backend = open_backend(app, create=False)
    try:
        beats: list[Beat] = []
        workers: list[Worker] = []
        if isinstance(backend, LeaseBackend):
            within = LIVES * settings_of(app, backend).heartbeat
            beats = backend.beats(within)
            workers = backend.workers(within) if isinstance(backend, RunBackend) else []
            schedule.errors.extend(_zone_troubles(beats))
        now = backend.now()
        data: dict[str, Any] = {
            "backend": backend.name,
            "namespace": backend.namespace,
            "beats": [_beat_json(beat) for beat in beats],
            "workers": [_worker_json(worker) for worker in workers],
            "jobs": [_job_json(backend, job, now, schedule.errors) for job in schedule.jobs.values()],
        }
        where = backend.describe()
    finally:
        backend.close()
    if as_json:
        show_json(data)
    else:
        click.echo(f"store: {where}\n")
        show_table(
            f"{_count(beats, 'beat')} seen within {LIVES} heartbeats"
            if isinstance(backend, LeaseBackend)
            else "this store takes claims only: it does not know which beats there are",
            ("beat", "version", "skew", "seen"),
            [(beat["label"], beat["version"], f"{beat['skew']:+.3f} s", beat["seen"]) for beat in data["beats"]],
        )
        click.echo()
        if workers:
            show_table(
                f"{_count(workers, 'worker')} that ask the store",
                ("worker", "version", "queues", "seen"),
                [(work["label"], work["version"], " ".join(work["queues"]), work["seen"]) for work in data["workers"]],
            )
            click.echo()
        show_table(
            _count(data["jobs"], "job"),
            ("job", "last", "next"),
            [(job["job"], job["last"] or NONE, job["next"] or NONE) for job in data["jobs"]],
        )
    schedule.complain()


def _zone_troubles(beats: list[Beat]) -> list[ConfigurationError]:
    """A sentence for each zone that two beats read differently."""
    labels: dict[str, set[str]] = {}
    for one, other in itertools.combinations(beats, 2):
        for zone in disagreements(one.zones, other.zones):
            labels.setdefault(zone, set()).update((one.label, other.label))
    return [
        ConfigurationError(
            f"beats {' and '.join(sorted(labels[zone]))} have different zone data for {zone}: some slots may be sent "
            "twice; bring all hosts to one release and restart their beats, or set anarchon_packaged_tzdata"
        )
        for zone in sorted(labels)
    ]


def _beat_json(beat: Beat) -> dict[str, Any]:
    return {
        "label": beat.label,
        "owner": beat.owner,
        "version": beat.version,
        "skew": round(beat.skew / 1000, 3),
        "seen": time_text(beat.seen),
    }


def _worker_json(worker: Worker) -> dict[str, Any]:
    return {
        "label": worker.label,
        "owner": worker.owner,
        "version": worker.version,
        "queues": list(worker.queues),
        "seen": time_text(worker.seen),
    }


def _job_json(backend: ClaimBackend, job: Job, now: Millis, errors: list[ConfigurationError]) -> dict[str, Any]:
    last = backend.last_run(job.name)
    try:
        following = job.timetable.next(now)
    except Exception as error:
        errors.append(ConfigurationError(f"job {job.name!r}: {type(error).__name__}: {error}"))
        following = None
    return {
        "job": job.name,
        "last": None if last is None else time_text(instant(last.slot)),
        "next": None if following is None else time_text(following),
        "paused": False,
    }


def _count(things: list[Any], word: str) -> str:
    return f"{len(things)} {word}" if len(things) == 1 else f"{len(things)} {word}s"


@click.command("history", cls=CeleryCommand)
@click.argument("job")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many.")
@json_option
@click.pass_context
@guarded
def history(ctx: click.Context, job: str, limit: int, as_json: bool) -> None:
    """The latest runs of JOB, newest first."""
    app = app_of(ctx)
    backend = open_backend(app, create=False)
    try:
        runs = [run_json(run) for run in backend.history(job, limit)]
    finally:
        backend.close()
    if not runs:
        # A job that is gone may well have a past; a name that has neither is a slip of the pen.
        Schedule(app).job(job)
    if as_json:
        show_json(runs)
        return
    show_table(
        job,
        ("slot", "state", "attempt", "late", "beat", "reason"),
        [
            (
                run["slot"],
                run["state"],
                str(run["attempt"]),
                NONE if run["late"] is None else f"{run['late']:.3f} s",
                run["beat"] or NONE,
                run["reason"] or "",
            )
            for run in runs
        ],
    )
