"""What a pool of processes drops when its worker loses the broker: what no child has accepted yet.

The broker delivers those messages again, so Celery forgets them, and no callback of a request says so. Celery 5.7 also
forgets what is on its way into a child, which may execute it.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_anarchon.keeper import Keeper

logger = logging.getLogger("celery_anarchon.worker")


def watch(pool: Any, keeper: Keeper) -> None:
    """Let *keeper* know of runs that *pool* drops. A pool without an event loop drops none."""
    flush = getattr(pool, "flush", None)
    if flush is None:
        return

    def flushed() -> None:
        # Held on to: what is dropped has no other reference.
        jobs = [(held, held.handed()) for held in keeper.handed_over() if held.handed is not None]
        flush()
        for held, job in jobs:
            if job is None or job._accepted:
                # Accepted by a child, which will say more; without a job it has said so.
                continue
            if job._write_to is None:
                logger.warning("%s goes back: the broker was lost before its body began", held.name)
                held.begun = False
                keeper.give_back_unbegun(held)
            elif job._job not in job._cache:
                logger.warning(
                    "%s may have begun as the broker was lost, and nobody will say so: free when its lease is over",
                    held.name,
                )
                keeper.leave(held)

    pool.flush = flushed
