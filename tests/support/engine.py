"""One or more dispatchers over the memory backend and a manual clock: the whole engine without a thread or a sleep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.ticking import run_until

from celery_anarchon import events
from celery_anarchon.backends.memory import MemoryBackend, MemoryStore
from celery_anarchon.dispatcher import Dispatcher
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.options import JobOptions, Settings
from celery_anarchon.publishing import BrokerAway, Builder, Dispatch, PublishUnclear
from celery_anarchon.testing.claimonly import ClaimOnlyMemory, ClaimOnlyStore
from celery_anarchon.testing.clock import ManualClock
from celery_anarchon.timetable import Interval, Timetable

SECOND: Millis = 1_000
MINUTE: Millis = 60 * SECOND
START: Millis = 1_774_746_000_000
SETTINGS = Settings(lease=30 * SECOND, heartbeat=10 * SECOND, batch=100)


@dataclass
class Outbox:
    """A broker that a test can switch off, and a list of what arrived."""

    arrived: list[tuple[str, Millis, str]] = field(default_factory=list)
    away: bool = False
    mood: Callable[[Dispatch], None] | None = None
    """Called before a message arrives; may raise."""
    after: Callable[[Dispatch], None] | None = None
    """Called when it has arrived; may raise."""
    checks: int = 0

    def check(self) -> None:
        self.checks += 1
        if self.away:
            raise BrokerAway("connection refused")

    def publish(self, dispatch: Dispatch) -> None:
        if self.away:
            raise BrokerAway("connection refused")
        if self.mood is not None:
            self.mood(dispatch)
        self.arrived.append((dispatch.job.name, dispatch.slot, dispatch.run_id))
        if self.after is not None:
            self.after(dispatch)

    def close(self) -> None:
        pass

    @property
    def slots(self) -> list[tuple[str, Millis]]:
        return [(job, slot) for job, slot, _ in self.arrived]


class Moody(MemoryBackend):
    """A memory backend whose calls can be made to fail, before or after they are applied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.away = False
        self.refused: set[str] = set()
        self.lose_reply_of: set[str] = set()
        self.calls: list[str] = []


class MoodyClaims(ClaimOnlyMemory):
    """The same for a store that only takes claims."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.away = False
        self.refused: set[str] = set()
        self.lose_reply_of: set[str] = set()
        self.calls: list[str] = []


def _moody(name: str, kind: type[Any] = MemoryBackend) -> Any:
    honest = getattr(kind, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        if self.away:
            raise BackendUnavailable("no route to the store")
        if name in self.refused:
            raise BackendUnavailable("OOM command not allowed")
        answer = honest(self, *args, **kwargs)
        if name in self.lose_reply_of:
            raise OutcomeUnknown("the reply was lost")
        return answer

    return call


for _name in [
    "open",
    "now",
    "claim",
    "claim_and_send",
    "takeover_and_send",
    "decided",
    "confirm",
    "abandon",
    "give_up",
    "record",
    "register",
    "lapsed",
    "takeover",
    "tidy",
    "beat_seen",
    "beat_left",
    "beats",
]:
    setattr(Moody, _name, _moody(_name))
    if hasattr(ClaimOnlyMemory, _name):
        setattr(MoodyClaims, _name, _moody(_name, ClaimOnlyMemory))


@dataclass
class World:
    """A store, a clock and a broker that several beats share."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(wall=START))
    outbox: Outbox = field(default_factory=Outbox)
    settings: Settings = SETTINGS
    beats: dict[str, Dispatcher] = field(default_factory=dict)
    seen: list[tuple[str, events.Event]] = field(default_factory=list)
    claim_only: dict[str, Any] | None = None
    """Not None: the store only takes claims; the options of its clients."""

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)
        self.claims = ClaimOnlyStore(self.clock)

    def client(self) -> Any:
        return Moody(store=self.store) if self.claim_only is None else MoodyClaims(store=self.claims, **self.claim_only)

    def beat(
        self,
        name: str = "a",
        *jobs: Job,
        publisher: Outbox | None = None,
        kind: Any = Dispatcher,
        builder: Builder | None = None,
    ) -> Dispatcher:
        beat: Dispatcher = kind(
            backend=self.client(),
            publisher=publisher or self.outbox,
            builder=builder,
            owner=f"owner-{name}",
            label=name,
            settings=self.settings,
            clock=self.clock,
            fanout=events.Fanout(lambda event: self.seen.append((name, event))),
        )
        beat.open()
        beat.load({job.name: job for job in jobs})
        self.beats[name] = beat
        return beat

    def backend(self, name: str = "a") -> Moody | MoodyClaims:
        backend = self.beats[name].backend
        assert isinstance(backend, (Moody, MoodyClaims))
        return backend

    def run(self, span: Millis, *names: str, step: Millis | None = None) -> None:
        """Let the named beats (default: all) tick for *span*, each when it asked to."""
        ticks = [self.beats[name].tick for name in names or self.beats]
        run_until(self.clock, self.clock.wall() + span, *ticks, step=step)

    def lose_a_reply_of(self, call: str, name: str = "a", patience: Millis = 5 * MINUTE) -> None:
        """Run until the answer to one such call of a beat was lost."""
        backend, until = self.backend(name), self.clock.wall() + patience
        before = backend.calls.count(call)
        backend.lose_reply_of = {call}
        while backend.calls.count(call) == before:
            assert self.clock.wall() < until, f"{call} was not called"
            self.run(100)
        backend.lose_reply_of = set()

    def events_of(self, kind: type[Any], name: str | None = None) -> list[Any]:
        return [event for who, event in self.seen if isinstance(event, kind) and name in (None, who)]

    def states(self, job: str) -> dict[Millis, str]:
        reader = self.client()
        return {
            round(run.slot.timestamp() * 1000): f"{run.state}" + (f" ({run.reason})" if run.reason else "")
            for run in reversed(reader.history(job, 1000))
        }


def job(name: str = "job", every: Millis = MINUTE, timetable: Timetable | None = None, **options: Any) -> Job:
    return Job(name=name, timetable=timetable or Interval(every), options=JobOptions(**options), task=f"proj.{name}")


__all__ = ["MINUTE", "SECOND", "SETTINGS", "START", "Moody", "Outbox", "PublishUnclear", "World", "job"]


class Failing(Interval):
    """Works until it is told to fail."""

    fails = False

    def next(self, after: Millis) -> Millis | None:
        return self._or_fail(super().next(after))

    def last(self, until: Millis) -> Millis | None:
        return self._or_fail(super().last(until))

    def _or_fail(self, slot: Millis | None) -> Millis | None:
        if self.fails:
            raise KeyError("calendar")
        return slot
