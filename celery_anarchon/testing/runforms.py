"""Short forms of what beats and workers say of a run, for clauses that read as a story.

Belongs here: one call of the contract each, with what no clause cares for filled in. Does not belong here: clauses.
"""

from __future__ import annotations

from celery_anarchon.backends.base import ClaimBackend, ClaimRequest, Confirmation, Terms
from celery_anarchon.backends.runs import (
    GiveBack,
    LapsedEnd,
    NextTry,
    RunBackend,
    RunHold,
    Settlement,
    Start,
    StartResult,
    Unstarted,
)
from celery_anarchon.model import Answer, GateAnswer, Millis, Overlap, Run, RunState
from celery_anarchon.testing.contenders import at_once as at_once
from celery_anarchon.testing.harness import LONG


def terms(
    max_attempts: int | None = None,
    overlap: Overlap = Overlap.ALLOW,
    *,
    lease: Millis = LONG,
    queue_timeout: Millis = LONG,
) -> Terms:
    return Terms(lease=lease, queue_timeout=queue_timeout, max_attempts=max_attempts, overlap=overlap)


PLAIN = terms()
SKIP = terms(overlap=Overlap.SKIP)
QUEUE_ONE = terms(overlap=Overlap.QUEUE_ONE)
ONCE = terms(1)
TWICE = terms(2)


# --- beats ------------------------------------------------------------------------------------------------------------


def ask_run(job: str, slot: Millis, owner: str, of: Terms | None = PLAIN) -> ClaimRequest:
    return ClaimRequest(job=job, slot=slot, owner=owner, beat="beat", lease=LONG, terms=of)


def claim_run(client: ClaimBackend, job: str, slot: Millis, owner: str, of: Terms | None = PLAIN) -> Answer:
    return client.claim([ask_run(job, slot, owner, of)])[0].answer


def confirm_run(
    client: ClaimBackend, job: str, slot: Millis, owner: str = "beat", attempt: int = 1, delay: Millis = 0
) -> bool:
    confirmation = Confirmation(job=job, slot=slot, owner=owner, attempt=attempt, late=7, delay=delay)
    return client.confirm([confirmation])[0]


def send(client: ClaimBackend, job: str, slot: Millis, of: Terms | None = PLAIN, owner: str = "beat") -> None:
    """Claimed and published: QUEUED, or DISPATCHED where nobody follows it."""
    assert claim_run(client, job, slot, owner, of) is Answer.WON
    assert confirm_run(client, job, slot, owner)


# --- workers ----------------------------------------------------------------------------------------------------------


def delivery(
    job: str,
    slot: Millis,
    token: str,
    attempt: int = 1,
    retries: int = 0,
    of: Terms = PLAIN,
    *,
    acks_late: bool = False,
    worker: str | None = None,
) -> Start:
    """Of this message. Its worker is called after it."""
    return Start(
        job=job,
        slot=slot,
        attempt=attempt,
        retries=retries,
        token=token,
        worker=worker or f"worker of {token}",
        terms=of,
        acks_late=acks_late,
        late=3,
        beat="beat",
    )


def start(
    client: RunBackend,
    job: str,
    slot: Millis,
    token: str,
    attempt: int = 1,
    retries: int = 0,
    of: Terms = PLAIN,
    *,
    acks_late: bool = False,
) -> StartResult:
    asked = delivery(job, slot, token, attempt, retries, of, acks_late=acks_late)
    results = client.start([asked])
    assert len(results) == 1
    return results[0]


def held(job: str, slot: Millis, token: str, attempt: int = 1, retries: int = 0) -> RunHold:
    return RunHold(job=job, slot=slot, attempt=attempt, retries=retries, token=token)


def heartbeat(client: RunBackend, job: str, slot: Millis, token: str, attempt: int = 1, retries: int = 0) -> bool:
    return client.heartbeat([held(job, slot, token, attempt, retries)])[0]


def ending(
    job: str,
    slot: Millis,
    token: str,
    attempt: int = 1,
    retries: int = 0,
    state: RunState = RunState.SUCCEEDED,
    reason: str | None = None,
) -> Settlement:
    return Settlement(job=job, slot=slot, attempt=attempt, retries=retries, token=token, state=state, reason=reason)


def settle(
    client: RunBackend,
    job: str,
    slot: Millis,
    token: str,
    attempt: int = 1,
    retries: int = 0,
    state: RunState = RunState.SUCCEEDED,
    reason: str | None = None,
) -> bool:
    end = ending(job, slot, token, attempt, retries, state, reason)
    return client.settle([end])[0]


def retrying(
    client: RunBackend, job: str, slot: Millis, token: str, attempt: int = 1, retries: int = 0, delay: Millis = 0
) -> bool:
    a_try = NextTry(job=job, slot=slot, attempt=attempt, retries=retries, token=token, delay=delay)
    return client.retrying([a_try])[0]


def give_back(
    client: RunBackend, job: str, slot: Millis, token: str, attempt: int = 1, retries: int = 0, message_attempt: int = 1
) -> bool:
    back = GiveBack(job=job, slot=slot, attempt=attempt, retries=retries, token=token, message_attempt=message_attempt)
    return client.give_back([back])[0]


def release(client: RunBackend, job: str, slot: Millis, token: str, attempt: int = 1, retries: int = 0) -> bool:
    return client.release([held(job, slot, token, attempt, retries)])[0]


def unstarted(
    client: RunBackend, job: str, slot: Millis, attempt: int = 1, retries: int = 0, reason: str = "expired"
) -> bool:
    message = Unstarted(job=job, slot=slot, attempt=attempt, retries=retries, reason=reason)
    return client.unstarted([message])[0]


def end_lapsed(
    client: RunBackend,
    job: str,
    slot: Millis,
    was: RunState,
    attempt: int = 1,
    state: RunState = RunState.LOST,
    reason: str = "worker-lost",
) -> bool:
    end = LapsedEnd(job=job, slot=slot, attempt=attempt, was=was, state=state, reason=reason)
    return client.end_lapsed([end])[0]


# --- what is there ----------------------------------------------------------------------------------------------------


def look(client: ClaimBackend, job: str, slot: Millis) -> Run | None:
    """The record of this slot, through the history."""
    return next((run for run in client.history(job, 1_000) if slot_of(run) == slot), None)


def state_of(client: ClaimBackend, job: str, slot: Millis) -> RunState | None:
    run = look(client, job, slot)
    return None if run is None else run.state


def slot_of(run: Run) -> Millis:
    return round(run.slot.timestamp() * 1000)


def bring(client: RunBackend, job: str, slot: Millis, state: RunState, of: Terms = PLAIN, token: str = "d") -> None:
    """A run of attempt 1 in *state*, by the way that runs go."""
    if state is RunState.CLAIMED:
        assert claim_run(client, job, slot, "beat", of) is Answer.WON
        return
    send(client, job, slot, of)
    if state is RunState.QUEUED:
        return
    if state is RunState.LOST_IN_QUEUE:
        assert unstarted(client, job, slot)
        return
    assert start(client, job, slot, token, of=of).answer is GateAnswer.START
    if state is RunState.RETRYING:
        assert retrying(client, job, slot, token)
    elif state is not RunState.RUNNING:
        assert settle(client, job, slot, token, state=state)
