"""What a pool of processes forgets when its worker loses the broker.

The broker delivers again what is not acknowledged, so Celery's pool drops what no child has yet, and no callback of a
request says so. It also forgets what it has written to a child that has not accepted it, and, before Celery 5.7, mostly
what children execute: their ends would not be heard, nor their time limits kept.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_anarchon.keeper import Keeper

logger = logging.getLogger("celery_anarchon.worker")


def watch(pool: Any, keeper: Keeper) -> None:
    """Let *keeper* know of runs that *pool* drops, and *pool* remember the others. One without an event loop forgets
    nothing."""
    flush = getattr(pool, "flush", None)
    if flush is None:
        return

    def flushed() -> None:
        # Held on to: what is forgotten has no other reference.
        jobs = [(held, held.handed()) for held in keeper.handed_over() if held.handed is not None]
        flush()
        for held, job in jobs:
            if job is not None and job._write_to is None:
                logger.warning("%s goes back: the broker was lost before its body began", held.name)
                held.begun = False
                keeper.give_back_unbegun(held)
            elif job is None or not (job._accepted or job._write_to._is_alive()):
                logger.warning("%s was on its way to a process that is gone: free when its lease is over", held.name)
                keeper.leave(held)
            elif not job.ready():
                job._cache[job._job] = job

    pool.flush = flushed
