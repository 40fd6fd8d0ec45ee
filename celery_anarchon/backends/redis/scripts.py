"""The Lua scripts, one file each, and calls of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

Argument = bytes | str | int
"""What is bytes already is sent as it is; of the others each costs a step."""

_SENDING = frozenset({"claim", "takeover", "write"})
"""The scripts that write messages: ``sending.lua`` stands before them, too."""


@dataclass(frozen=True)
class Script:
    """One operation: what the server runs, and the digest by which it knows it once it has run it."""

    name: str
    source: bytes
    digest: bytes

    def __call__(self, keys: Sequence[bytes], args: Sequence[Argument]) -> Call:
        return Call(self, keys, args)


@dataclass(eq=False, slots=True)
class Call:
    """A script with its keys and arguments. In a cluster all keys carry one tag."""

    script: Script
    keys: Sequence[bytes]
    args: Sequence[Argument]

    def by_digest(self) -> tuple[Argument, ...]:
        keys = self.keys
        return b"EVALSHA", self.script.digest, b"%d" % len(keys), *keys, *self.args

    def by_source(self) -> tuple[Argument, ...]:
        """As a server wants it that has not seen the script since it was started. It then knows the digest."""
        return b"EVAL", self.script.source, len(self.keys), *self.keys, *self.args


@cache
def script(name: str) -> Script:
    folder = resources.files(__package__) / "lua"
    *folders, file = name.split("/")
    for one in folders:
        folder = folder / one
    files = ("common", "sending", file) if name in _SENDING else ("common", file)
    source = b"".join((folder / f"{one}.lua").read_bytes() for one in files)
    # SHA-1 is the server's choice; it guards nothing.
    return Script(name, source, hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())
