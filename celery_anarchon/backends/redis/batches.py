"""Batches: which calls the rows of an operation become, and whose reply is whose.

Outside a cluster a batch is one script call; in a cluster, where a call must keep to one node, it is one for each
shard, and all calls for a node go in one round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeVar

from celery_anarchon.backends.redis.keys import SHARDS, encoded
from celery_anarchon.backends.redis.scripts import Argument, Call, script
from celery_anarchon.backends.redis.store import RedisStore, chunks
from celery_anarchon.errors import OutcomeUnknown

ROWS_AT_ONCE = 1_000
"""Rows of one script call: the server does nothing else meanwhile. More calls still go in one round trip."""

_Item = TypeVar("_Item")
_Row = TypeVar("_Row")
_Rows = TypeVar("_Rows", bound=Sized)


class RedisBatches(RedisStore):
    """Belongs here: nothing that knows what an operation means."""

    def _asked(
        self,
        name: str,
        items: Sequence[Any],
        args_of: Callable[[Any], tuple[Argument, ...]],
        *,
        before: tuple[Argument, ...] = (),
        width: int = 1,
    ) -> list[Sequence[Any]]:
        """Ask a script that writes runs, with their keys, job, slot, and what *args_of* adds."""
        return self._each(name, items, self._keys.of, _named(args_of), before=before, width=width, wait=True)

    def _done(
        self,
        name: str,
        items: Sequence[Any],
        args_of: Callable[[Any], tuple[Argument, ...]],
        *,
        before: tuple[Argument, ...] = (),
    ) -> list[bool]:
        return [done == 1 for (done,) in self._asked(name, items, args_of, before=before)]

    def _grouped(self, items: Sequence[_Item]) -> list[list[tuple[int, _Item]]]:
        """The items with their places: all together, or by shard where a call must keep to one."""
        numbered = list(enumerate(items))
        if not self._source.sharded:
            return [numbered] if numbered else []
        groups: dict[int, list[tuple[int, _Item]]] = {}
        for number, item in numbered:
            groups.setdefault(self._keys.shard(encoded(item.job)), []).append((number, item))  # type: ignore[attr-defined]
        return list(groups.values())

    def _each(
        self,
        name: str,
        items: Sequence[Any],
        keys_of: Callable[[bytes], tuple[bytes, ...]],
        args_of: Callable[[bytes, Any], tuple[Argument, ...]],
        *,
        before: tuple[Argument, ...] = (),
        width: int = 1,
        wait: bool = False,
    ) -> list[Sequence[Any]]:
        """Ask a script for each item; what it replied to each, *width* values long, in their order."""

        def call_of(some: Sequence[Any]) -> Call:
            return _packed(name, some, keys_of, args_of, before)

        def rows_of(reply: Any) -> list[Sequence[Any]]:
            if not isinstance(reply, list) or len(reply) % width:
                return []
            return [reply] if len(reply) == width else list(chunks(reply, width))

        return self._in_calls(name, items, call_of, rows_of, wait=wait)

    def _in_calls(
        self,
        name: str,
        items: Sequence[_Item],
        call_of: Callable[[Sequence[_Item]], Call],
        rows_of: Callable[[Any], list[_Row]],
        *,
        wait: bool,
    ) -> list[_Row]:
        """Ask in as few calls as there may be; what the reply to each says of its items, in the order of *items*."""
        if len(items) == 1:
            # What a worker asks before each run.
            (reply,) = self._reply([call_of(items)], writes=True, wait=wait)
            return self._rows(name, rows_of(reply), 1, reply)
        calls: list[Call] = []
        places: list[list[int]] = []
        for group in self._grouped(items):
            for some in chunks(group, ROWS_AT_ONCE):
                calls.append(call_of([item for _, item in some]))
                places.append([number for number, _ in some])
        answers: dict[int, _Row] = {}
        for numbers, reply in zip(places, self._reply(calls, writes=True, wait=wait), strict=True):
            answers.update(zip(numbers, self._rows(name, rows_of(reply), len(numbers), reply), strict=True))
        return [answers[number] for number in range(len(items))]

    def _rows(self, name: str, rows: _Rows, wanted: int, reply: Any) -> _Rows:
        if len(rows) != wanted:
            raise OutcomeUnknown(f"{self.describe()}: {name} was answered {str(reply)[:200]}")
        return rows

    def _of_all_shards(self, name: str, key_of: Callable[[int], bytes], limit: int) -> list[Any]:
        """What a script that only reads says of the shards: one call, or one for each where a call must keep to one."""
        keys = [key_of(shard) for shard in range(SHARDS)]
        groups = [[key] for key in keys] if self._source.sharded else [keys]
        look = script(name)
        return self._reply([look(group, [max(limit, 0)]) for group in groups], writes=False)


def _named(args_of: Callable[[Any], tuple[Argument, ...]]) -> Callable[[bytes, Any], tuple[Argument, ...]]:
    return lambda job, one: (job, one.slot, *args_of(one))


def _packed(
    name: str,
    items: Sequence[Any],
    keys_of: Callable[[bytes], tuple[bytes, ...]],
    args_of: Callable[[bytes, Any], tuple[Argument, ...]],
    before: tuple[Argument, ...] = (),
) -> Call:
    keys: list[bytes] = []
    args: list[Argument] = [*before]
    for item in items:
        job = encoded(item.job)
        keys += keys_of(job)
        args += args_of(job, item)
    return script(name)(keys, args)
