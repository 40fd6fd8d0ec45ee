"""``celery anarchon explain`` and ``release``: why a slot is as it is, and letting go of what blocks a job."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_anarchon import slots
from celery_anarchon.app import open_backend
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.cli.common import Schedule, app_of, guarded, json_option, show_json
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.model import Millis, Run, RunState
from celery_anarchon.wire import instant, parse_time, run_json, time_text

LATE: float = 5.0
"""Seconds after which a publish is called late: what took no longer was a slow moment."""

FURTHEST = 100_000
"""Records of a job that are searched for a slot."""

VERDICTS = {
    RunState.SKIPPED: "skipped",
    RunState.MISFIRE: "misfire",
    RunState.SUPERSEDED: "superseded",
    RunState.PAUSED: "paused",
    RunState.NOT_SENT: "not-sent",
    RunState.LOST: "lost",
    RunState.LOST_IN_QUEUE: "lost",
    RunState.CLAIMED: "unknown",
    RunState.WAITING: "unknown",
}
"""Of a record; any other state is of a message that was sent."""

REASONS = {
    "attempts-used-up": "its worker died or stopped, and max_attempts leaves no further one",
    "beat-stopped": "its beat stopped before it could send it, and on this store nobody else may",
    "before-first-seen": "the store first saw this job after that time",
    "catch-up": "no beat worked then, and catch_up does not reach back so far",
    "exception": "its body raised",
    "expired": "its message expired before a worker took it",
    "ignored": "its body raised Ignore",
    "invalid-message": "the worker could not read its message",
    "job-removed": "no living beat has the job in its schedule",
    "max-late": "it would have been sent later than max_late allows",
    "newer-slot": "a newer slot of the job was sent in its place (coalesce, or overlap=queue_one)",
    "no-gate-seen": "no worker that tells its end was ever seen",
    "overlap": "an earlier run of the job was still going on (overlap=skip)",
    "publish-error": "its message could not be made, or the broker refused it",
    "publish-unclear": "the broker did not say whether it has its message, until it was too late to ask again",
    "queue-timeout": "no worker started it, or its next try, within queue_timeout",
    "rejected": "its body raised Reject",
    "released": "a person let it go (release)",
    "revoked": "it was revoked",
    "soft-time-limit": "it ran into its soft time limit",
    "store-unknown": "the store could not be asked for leave to run it (on_unknown=skip)",
    "time-limit": "it ran longer than its timeout",
    "too-old": "it was claimed later than the store remembers claims",
    "unknown-task": "the worker that got it does not know the task",
    "worker-lost": "the process that ran it died",
    "worker-stopped": "its worker was stopped, and no further attempt is due",
}
"""What each reason of a record means."""


@click.command("explain", cls=CeleryCommand)
@click.argument("job")
@click.argument("slot")
@json_option
@click.pass_context
@guarded
def explain(ctx: click.Context, job: str, slot: str, as_json: bool) -> None:
    """What became of the SLOT of JOB, and why. SLOT: an ISO time with its zone."""
    app = app_of(ctx)
    known = Schedule(app).job(job)
    at = _slot(slot)
    backend = open_backend(app, create=False)
    try:
        now = backend.now()
        runs = backend.history(job, FURTHEST)
    finally:
        backend.close()
    run = next((run for run in runs if instant(run.slot) == at), None)
    if run is not None:
        verdict, reason, text = _of_record(run, known, leases=isinstance(backend, RunBackend))
    else:
        verdict, reason, text = _without_record(known, at, now, runs)
    if as_json:
        tries = [] if run is None or not run.beat else [_try(run)]
        show_json(
            {
                "job": job,
                "slot": time_text(at),
                "verdict": verdict,
                "reason": reason,
                "run": None if run is None else run_json(run),
                "tries": tries,
            }
        )
    else:
        click.echo(f"{job} {time_text(at)} {verdict}: {text}")


def _slot(text: str) -> Millis:
    try:
        return parse_time(text)
    except ValueError:
        raise ConfigurationError(
            f"slot {text!r} is no time with a zone; write it as in the log: 2026-03-29T01:00:00.000Z"
        ) from None


def _try(run: Run) -> dict[str, Any]:
    at = run.claimed_at or run.ended_at
    return {"beat": run.beat, "at": None if at is None else time_text(instant(at)), "answer": "won"}


def _of_record(run: Run, job: Job, *, leases: bool) -> tuple[str, str | None, str]:
    """Verdict, reason, and the line that a person reads. *leases*: another beat may take over."""
    verdict = VERDICTS.get(run.state, "sent")
    meaning = REASONS.get(run.reason or "", run.reason)
    words = [] if meaning is None else [meaning]
    if verdict == "sent":
        words = _story(run, meaning)
        if run.late is not None and run.late - job.options.jitter / 1000 > LATE:
            verdict = "late"
    elif run.state is RunState.CLAIMED:
        otherwise = "another sends it" if leases else "the slot is lost: on this store nobody else may send it"
        words = [f"claimed by beat {run.beat}, not sent yet; if that beat is dead {otherwise}"]
    elif run.state is RunState.WAITING:
        words = ["waits for the end of an earlier run of the job (overlap=queue_one)"]
    elif verdict == "lost" and run.worker:
        words.append(f"attempt {run.attempt} was on worker {run.worker}")
    if run.blocked_by:
        words.append(f"the other run: {run.blocked_by}")
    if run.refused:
        words.append(f"{run.refused} further deliveries of its message were refused")
    return verdict, run.reason, "; ".join(words) or str(run.state)


def _story(run: Run, meaning: str | None) -> list[str]:
    words = [f"sent by beat {run.beat}" + ("" if run.late is None else f" {run.late:.3f} s after its time")]
    if run.state is RunState.QUEUED:
        words.append("no worker has started it yet")
    elif run.state is RunState.DISPATCHED:
        words.append("what became of it on its worker is not followed" if meaning is None else meaning)
    else:
        attempt = f" (attempt {run.attempt})" if run.attempt > 1 else ""
        words.append(f"{run.state}{attempt} on worker {run.worker}" + (f": {meaning}" if meaning else ""))
    return words


def _without_record(job: Job, at: Millis, now: Millis, runs: list[Run]) -> tuple[str, str, str]:
    before, after = job.timetable.next(at - 1), job.timetable.next(at)
    if before != at:
        earlier = job.timetable.last(at)
        near = " and ".join(time_text(slot) for slot in (earlier, after) if slot is not None)
        return "never-due", "no-such-slot", f"the job has no slot at that time; its nearest are {near or 'none'}"
    if slots.due_time(job.name, job.timetable, job.options, at) > now:
        return "unknown", "not-due-yet", "its time has not come"
    if not runs:
        return "unknown", "no-record", "nothing of this job is recorded: no beat has sent it yet, or the store is new"
    if at < instant(runs[-1].slot):
        return (
            "unknown",
            "too-old",
            f"older than all that is kept (history_size {job.options.history_size}), or before the job was first seen",
        )
    return "unknown", "no-record", "no beat has decided it: none works, or the job was first seen after that time"


@click.command("release", cls=CeleryCommand)
@click.argument("job")
@json_option
@click.pass_context
@guarded
def release(ctx: click.Context, job: str, as_json: bool) -> None:
    """Let go of what blocks JOB: its unsettled runs end as lost, and the next slot is sent. A body that still runs is
    not stopped; it is told to be lost."""
    app = app_of(ctx)
    backend = open_backend(app, create=False)
    try:
        if not isinstance(backend, RunBackend):
            raise ConfigurationError(f"{backend.describe()}: nothing holds a job on a store that follows no runs")
        held = backend.release_job(job)
    finally:
        backend.close()
    if not held:
        Schedule(app).job(job)
    if as_json:
        show_json([run_json(run) for run in held])
    elif not held:
        click.echo(f"{job}: nothing holds it")
    for run in [] if as_json else held:
        where = f" on worker {run.worker}" if run.worker else ""
        click.echo(f"{job} {time_text(instant(run.slot))} released: attempt {run.attempt}{where}, now {run.state}")
