"""The tables and the chart of ``backends-overview.md``, made of what the stores say of themselves.

    python docs/overview.py         writes them anew into the page

Two sources: the traits of each backend, and ``kit-report.json``, which says what the conformance kit asks of each store
(a test holds it to what is really asked). A cell says "yes" only if the traits say so and the clauses behind it are
asked of that store. ``conf.py`` compares the page with this whenever the documentation is built, and a page that is
stale ends the build.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from celery_anarchon import NatsBackend, PostgresBackend, RabbitMQBackend, RedisBackend, SqliteBackend, ValkeyBackend
from celery_anarchon.backends import postgres, sqlite
from celery_anarchon.backends.nats import connection as nats
from celery_anarchon.backends.rabbitmq import link as rabbitmq
from celery_anarchon.backends.redis import idmp, store, strategies
from celery_anarchon.errors import OptionError
from celery_anarchon.model import Traits
from celery_anarchon.options import JOB_OPTIONS, LEASE_ONLY, OWN_SETTINGS, Kind, check_job_options, scheduler_settings

FOLDER = Path(__file__).parent
PAGE = FOLDER / "backends-overview.md"
REPORT = FOLDER / "kit-report.json"


class Store(NamedTuple):
    """One column of the report, by the backend's name."""

    name: str
    traits: Traits
    remembered_by: str = ""
    """The option that says for how long, where it is not for ever."""


class Column(NamedTuple):
    title: str
    machines: str
    needs: str
    stores: tuple[Store, ...]


def _claims(name: str, by: str = "") -> Store:
    _, _, strategy = name.partition(":")
    # The strategies are the same on both products, and so are their traits; the driver of one is enough to ask them.
    return Store(name, RedisBackend(strategy=strategy).traits, by)  # type: ignore[call-overload]


def _version(*numbers: int) -> str:
    return ".".join(map(str, numbers))


def columns() -> list[Column]:
    redis = f"Redis {store.OLDEST}+ or Valkey"
    return [
        Column(
            "Redis / Valkey `lease`",
            "yes",
            redis,
            (Store("redis:lease", RedisBackend.traits), Store("valkey:lease", ValkeyBackend.traits)),
        ),
        Column(
            "Redis / Valkey, other strategies",
            "yes",
            f"{redis}; `idmp`: Redis {_version(*idmp.OLDEST)}+",
            (
                _claims("redis:stream-id"),
                _claims("valkey:stream-id"),
                _claims("redis:idmp", "duration"),
                _claims("redis:script", "window"),
                _claims("valkey:script", "window"),
            ),
        ),
        Column(
            "PostgreSQL", "yes", f"PostgreSQL {postgres.OLDEST_POSTGRES}+", (Store("postgres", PostgresBackend.traits),)
        ),
        Column(
            "SQLite / libSQL",
            "with a libSQL server",
            f"SQLite {_version(*sqlite.OLDEST_SQLITE[:2])}+",
            (Store("sqlite", SqliteBackend.traits), Store("libsql", SqliteBackend.traits)),
        ),
        Column(
            "RabbitMQ",
            "yes",
            f"RabbitMQ {_version(*rabbitmq.OLDEST)}+",
            (Store("rabbitmq", RabbitMQBackend.traits, "slot_ttl"),),
        ),
        Column(
            "NATS",
            "yes",
            f"NATS server {_version(*nats.OLDEST)}+ with JetStream",
            (Store("nats", NatsBackend.traits, "duplicate_window"),),
        ),
    ]


# --- what each backend gives you --------------------------------------------------------------------------------------


class Row(NamedTuple):
    label: str
    cell: Callable[[Store], str]
    clauses: tuple[str, ...] = ()
    """Of the conformance kit: what "yes" is worth."""


def _yes(trait: str) -> Callable[[Store], str]:
    return lambda of: "yes" if getattr(of.traits, trait) else "no"


def _by_age(of: Store) -> str:
    if not of.traits.history_by_age:
        return "no"
    return "yes ¹" if of.traits.history_ttl_above else "yes"


def _remembered(of: Store) -> str:
    if of.traits.horizon is None:
        return "always"
    # Four fifths of it are counted on.
    return f"`{of.remembered_by}`, {of.traits.horizon * 5 // 4 // 1000} s"


ROWS = [
    Row("One winner for each slot", lambda of: "yes", ("C1", "C5")),
    Row("Claim and message in one step, where it is the broker as well", _yes("one_step"), ("O1", "O2")),
    Row("Another beat goes on for a dead one", _yes("leases"), ("C11", "L2", "L3", "L4")),
    Row('No overlapping runs (`overlap="skip"`)', _yes("follows_runs"), ("W1", "W2", "W3")),
    Row("Attempts after a dead worker (`max_attempts`)", _yes("follows_runs"), ("W4", "W5", "W13")),
    Row("Catch-up after downtime (`catch_up`)", _yes("leases"), ("L1",)),
    Row("Hand-over on stop", _yes("leases"), ("L5", "W18", "W19")),
    Row("History (`history()`, `last_run()`)", lambda of: "yes", ("C19",)),
    Row("History by age (`history_ttl`)", _by_age),
    Row("`history_size` for each job", lambda of: "shared ²" if of.traits.one_history_size else "yes"),
    Row("How long a claim is remembered", _remembered),
    Row("Claims survive a restart of the store", _yes("durable"), ("C10",)),
    Row("Job names", lambda of: "any" if of.traits.any_job_name else "some", ("C4",)),
]

NOTES = """\
¹ With `script`, `history_ttl` must be longer than the strategy's `window`. ² NATS keeps one history size for all its
jobs: the largest of the backend's `history_size` and every job's."""


def gives() -> str:
    asked = json.loads(REPORT.read_text())
    found = columns()
    lines = [["", *(column.title for column in found)]]
    for row in ROWS:
        lines.append([row.label, *(_cell(row, column, asked) for column in found)])
    lines.append(["Beats on several machines", *(column.machines for column in found)])
    lines.append(["Needs", *(column.needs for column in found)])
    return f"{_table(lines)}\n\n{NOTES}"


def _cell(row: Row, column: Column, asked: dict[str, Any]) -> str:
    said = {one.name: row.cell(one) for one in column.stores}
    for name, word in said.items():
        missing = set(row.clauses) - set(asked[name]["asked"])
        if word not in ("no", "some") and missing:
            raise ValueError(f"{name}: {row.label}: the kit does not ask {', '.join(sorted(missing))}")
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    if {"yes", "yes ¹"} == set(said.values()):
        return "yes ¹"
    words = {name.partition(":")[2]: word for name, word in said.items()}
    return "; ".join(f"`{name}`: {word}" for name, word in words.items())


# --- which options each backend takes ---------------------------------------------------------------------------------

_VALUES = {
    "overlap": "skip",
    "max_attempts": 2,
    "queue_timeout": 60,
    "on_unknown": "skip",
    "coalesce": "all",
    "timezone": "UTC",
    "history_size": 5,
    "history_ttl": "1d",
}
_ORDER = [
    "jitter",
    "timeout",
    "offset",
    "timezone",
    "max_late",
    "history_size",
    "history_ttl",
    "overlap",
    "max_attempts",
]
_ORDER += ["queue_timeout", "on_unknown", "catch_up", "coalesce"]

_REMARKS = {
    "offset": "intervals",
    "timezone": "crontabs",
    "max_late": "claim-only: `jitter` + `max_late` must be shorter than four fifths of how long a claim is remembered",
    "history_size": "NATS: the largest wins, see ²",
    "overlap": "`at` never takes it",
}


def options() -> str:
    assert set(_ORDER) == JOB_OPTIONS
    kinds = {True: [], False: []}  # type: dict[bool, list[Store]]
    for column in columns():
        for one in column.stores:
            kinds[one.traits.leases].append(one)
    lines = [["option", "lease backends", "claim-only backends", ""]]
    lines.append(["`args`, `kwargs`", "yes", "yes", "Celery's own"])
    for option in _ORDER:
        lines.append(
            [f"`{option}`", _taken(option, kinds[True]), _taken(option, kinds[False]), _REMARKS.get(option, "")]
        )
    claim_only = kinds[False][0].traits
    refused = [f"`anarchon_{name}`" for name in sorted(OWN_SETTINGS) if not _sets(name, claim_only)]
    lines.append([", ".join(refused), "yes", "refused", "settings of the scheduler"])
    return _table(lines)


def _sets(setting: str, traits: Traits) -> bool:
    try:
        scheduler_settings({setting: {"packaged_tzdata": False, "one_step": "auto"}.get(setting, 5)}, traits)
    except OptionError:
        return False
    return True


def _taken(option: str, stores: Sequence[Store]) -> str:
    kind = {"timezone": Kind.CRON}.get(option, Kind.INTERVAL)
    takes = []
    for one in stores:
        try:
            check_job_options("job", {option: _VALUES.get(option, 5)}, kind, one.traits)
            takes.append(one.name)
        except TypeError:
            pass
    if len(takes) == len(stores):
        return "yes"
    if not takes:
        assert option in LEASE_ONLY
        return "refused"
    assert {name.partition(":")[0] for name in takes} == {"redis", "valkey"}
    return "Redis and Valkey; RabbitMQ and NATS refuse it"


# --- each backend's own options ---------------------------------------------------------------------------------------


def constructors() -> str:
    lines = [["backend", "option", "default", "what it is for"]]
    kinds = (RedisBackend, ValkeyBackend, PostgresBackend, SqliteBackend, RabbitMQBackend, NatsBackend)
    for kind in kinds:
        name = f"`{kind.__name__}`"
        said = _said_of_options(kind if kind is not ValkeyBackend else RedisBackend)
        for option, parameter in inspect.signature(kind.__init__).parameters.items():
            if option in ("self", "early_tolerance"):
                continue
            text = said.get(option) or ("like `redis`" if option == "valkey" else "")
            if kind is ValkeyBackend and option == "strategy":
                text = "as above, without `idmp`"
            if not text:
                raise ValueError(f"{kind.__name__}: nothing is said of {option}")
            lines.append([name, f"`{option}`", f"`{parameter.default!r}`", text])
            name = ""
    for name, taken in strategies.OPTIONS.items():
        for option, (_, default) in taken.items():
            shown = default if option == "max_size" else default // 1000
            text = {"max_size": "how many claims of a job are remembered at most"}.get(
                option, "how long a claim is remembered"
            )
            lines.append([f"strategy `{name}`", f"`{option}`", f"`{shown}`", text])
    return _table(lines)


def _said_of_options(kind: type[Any]) -> dict[str, str]:
    """What the docstring says of each parameter."""
    text = re.sub(r"\s+", " ", inspect.getdoc(kind) or "")
    found = {}
    for part in text.split(":param ")[1:]:
        name, _, words = part.partition(": ")
        words = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", words).replace("``", "`")
        found[name] = words.rstrip(". ").replace("|", "\\|")
    return found


# --- the chart --------------------------------------------------------------------------------------------------------

_CHOICES = [
    ("Redis or Valkey", "RedisBackend, ValkeyBackend: strategy lease (the default)", "redis:lease"),
    ("PostgreSQL", "PostgresBackend", "postgres"),
    ("only one machine", "SqliteBackend on a file", "sqlite"),
    ("a libSQL server or Turso", "SqliteBackend with its URL", "libsql"),
    ("only RabbitMQ", "RabbitMQBackend", "rabbitmq"),
    ("only NATS", "NatsBackend", "nats"),
]


def chart() -> str:
    leases = {one.name: one.traits.leases for column in columns() for one in column.stores}
    lines = ["  What do your beats share already?", "    |"]
    for share, backend, name in _CHOICES:
        corner = "'" if share == _CHOICES[-1][0] else "|"
        kind = "" if leases[name] else " (claim-only)"
        lines.append(f"    {corner}-- {share} {'-' * (26 - len(share))}> {backend}{kind}")
    return "\n".join(["```text", *lines, "```"])


# --- the page ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], str]] = {"chart": chart, "gives": gives, "options": options, "constructors": constructors}


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def _sections(text: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"^% begin: (\w+)\n(.*?)^% end: \1$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2].strip("\n")


def stale() -> list[str]:
    """Which parts of the page are not what they would be now."""
    there = dict(_sections(PAGE.read_text()))
    return [name for name, make in PARTS.items() if there.get(name) != make()]


def write() -> None:
    text = PAGE.read_text()
    for name, make in PARTS.items():
        part = f"% begin: {name}\n\n{make()}\n\n% end: {name}"
        text = re.sub(rf"^% begin: {name}\n.*?^% end: {name}$", lambda _, part=part: part, text, flags=re.M | re.S)
    PAGE.write_text(text)


def check(*_: object) -> None:
    """For Sphinx: ends the build when the page is stale."""
    from sphinx.errors import ExtensionError

    parts = stale()
    if parts:
        raise ExtensionError(f"{PAGE.name}: stale ({', '.join(parts)}): run python docs/overview.py")


if __name__ == "__main__":
    write()
