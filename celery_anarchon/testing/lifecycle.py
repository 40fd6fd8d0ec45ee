"""The life cycle of every backend's client (X): close, fork, signals, whose namespace it is.

Each docstring names the incident it prevents.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.errors import ConfigurationError, LayoutMismatch
from celery_anarchon.model import Answer, Millis
from celery_anarchon.testing.contenders import in_child, interrupted, leftovers
from celery_anarchon.testing.harness import (
    BackendHarness,
    Suite,
    ask,
    claim,
    claim_all,
    confirm,
    needs,
    raised_by,
)

WON, TAKEN = Answer.WON, Answer.TAKEN


class LifeSuite(Suite):
    """What each suite begins with."""

    patience: ClassVar[float] = 30
    """Seconds after which a call that should be over is said to hang."""

    def base(self, client: ClaimBackend) -> Millis:
        """A slot that is an hour old, or as old as half of what the store remembers."""
        return client.now() - min(3_600_000, (client.traits.horizon or 7_200_000) // 2)

    def to_its_owner(self, harness: BackendHarness) -> Answer:
        """What an owner that asks again is told, as long as it has not ended its claim."""
        return WON if harness.traits.knows_owner else TAKEN

    def test_X1_nothing_is_left_after_close(self, harness: BackendHarness) -> None:
        """Each reload of a beat leaves a thread and a socket, until the server refuses connections."""
        harness.connect().close()
        before = leftovers()
        client = harness.connect()
        client.open(harness.app_name)
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        client.close()
        client.close()
        self.assert_nothing_more_than(before)
        client.open(harness.app_name)
        assert claim(client, "job", slot, "a") is self.to_its_owner(harness)
        client.close()
        self.assert_nothing_more_than(before)

    def assert_nothing_more_than(self, before: Mapping[str, int]) -> None:
        """What a test before this one left behind may end meanwhile, and what was closed may need a moment for it."""
        give_up = time.monotonic() + min(self.patience, 5)
        now = leftovers()
        while any(count > before[kind] for kind, count in now.items()):
            assert time.monotonic() < give_up, f"{now} instead of {before}"
            time.sleep(0.05)
            now = leftovers()

    @needs("processes")
    def test_X2_a_client_works_after_a_fork(self, harness: BackendHarness) -> None:
        """A beat inside a worker is a fork: with the parent's socket or thread it hangs, or reads its replies."""
        client = harness.connect()
        slot = self.base(client)
        assert claim(client, "job", slot, "parent") is WON
        requests = [ask("job", slot, "child"), ask("job", slot + 1, "child")]
        assert in_child(lambda: claim_all(client, requests), self.patience) == [TAKEN, WON]
        asked = [ask("job", slot, "parent"), ask("job", slot + 1, "parent")]
        assert claim_all(client, asked) == [self.to_its_owner(harness), TAKEN]

    def test_X3_close_in_the_middle_of_a_call(self, harness: BackendHarness) -> None:
        """SIGTERM comes during a claim: its handler waits for the lock that the interrupted call holds, for ever; or
        the slot that was being claimed is left to its lease."""
        client = harness.connect()
        base = self.base(client)
        requests = [ask("job", base + number, "a") for number in range(3)]
        assert interrupted(lambda: claim_all(client, requests), client.close, self.patience) == [WON] * 3
        assert interrupted(lambda: confirm(client, "job", base, "a"), client.close, self.patience)
        assert claim_all(harness.connect(), [ask("job", base + n, "b") for n in range(3)]) == [TAKEN] * 3
        assert claim(client, "job", base + 1, "a") is self.to_its_owner(harness)
        client.close()

    def test_X4_another_app_is_refused(self, harness: BackendHarness) -> None:
        """Two services with one store and one namespace: each claims, and then drops, the other's slots."""
        client = harness.connect()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        error = raised_by(harness.connect_spec("billing"))
        assert isinstance(error, LayoutMismatch), f"{error!r} instead of LayoutMismatch"
        assert "billing" in str(error) and harness.app_name in str(error), f"{error}: does not name both apps"
        assert harness.namespace in str(error)
        assert claim(harness.connect(), "job", slot, "b") is TAKEN

    def test_X4_a_newer_layout_is_refused(self, harness: BackendHarness) -> None:
        """A rollback of the deploy reads records that it does not understand, and writes them back without the rest."""
        harness.connect()
        harness.raw_forge_layout(99)
        error = raised_by(harness.connect_spec())
        assert isinstance(error, LayoutMismatch), f"{error!r} instead of LayoutMismatch"
        assert "99" in str(error) and isinstance(error, ConfigurationError)
