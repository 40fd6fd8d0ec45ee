"""What an error that a server sent, or that kept a reply away, says about a call.

Belongs here: the servers' words for what is wrong, and which of our errors they are. Does not belong here: sockets.
"""

from __future__ import annotations

import re

from celery_anarchon.backends.base import Unusable
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown

__all__ = ["Unusable", "connect_failure", "refusal", "sign_of", "words_of"]


_REFUSALS = {
    "LOADING": "it is reading its data from disk",
    "MASTERDOWN": "it is a replica without its master",
    "READONLY": "it is a replica; after a failover this passes, else name the master",
    "CLUSTERDOWN": "the cluster does not serve these keys just now",
    "TRYAGAIN": "the cluster is moving these keys",
    "ASK": "the cluster is moving these keys",
    "MISCONF": "it cannot save to disk and takes no writes; see its log",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write",
    "BUSY": "a script of somebody else keeps it busy",
    "OOM": "its memory is used up; raise maxmemory",
}
_WRONG = {
    "NOAUTH": "it wants a password: write it into the URL",
    "WRONGPASS": "wrong user or password",
    "NOPERM": "this user may not do that; see the rights in the documentation of the Redis store",
    "CROSSSLOT": "it is a cluster: write redis+cluster:// or valkey+cluster://",
    "MOVED": "it is a node of a cluster: write redis+cluster:// or valkey+cluster://",
}
"""Replies that mean: nothing was applied. Each stands first, or after "-" (errors of a script, Redis 6 and older)."""

_BY_CLASS = {
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ReadOnlyError": "READONLY",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "OutOfMemoryError": "OOM",
    "NoPermissionError": "NOPERM",
    "NoScriptError": "NOSCRIPT",
    "AuthenticationError": "NOAUTH",
    "AuthenticationWrongNumberOfArgsError": "NOAUTH",
    "MovedError": "MOVED",
    "ClusterCrossSlotError": "CROSSSLOT",
    "AskError": "ASK",
}
"""The drivers cut the words that they have a class for."""

_WORD = re.compile(r"(?:^|-)([A-Z]{3,})\b")


def words_of(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def sign_of(error: BaseException) -> str:
    """The word by which a server says what is wrong; empty: it said none, or nothing at all."""
    for kind in type(error).__mro__:
        if kind.__name__ in _BY_CLASS:
            sign = _BY_CLASS[kind.__name__]
            return "WRONGPASS" if sign == "NOAUTH" and "pass" in str(error).lower() else sign
    for word in _WORD.findall(str(error)):
        if word in _REFUSALS or word in _WRONG or word == "NOSCRIPT":
            return str(word)
    return ""


def refusal(where: str, error: BaseException) -> BackendUnavailable | OutcomeUnknown:
    """What a reply means that is an error."""
    sign = sign_of(error)
    words = words_of(error)
    if sign in _REFUSALS:
        return BackendUnavailable(f"{where}: {words}; {_REFUSALS[sign]}")
    if sign in _WRONG:
        return Unusable(f"{where}: {words}; {_WRONG[sign]}")
    if "unknown command" in words.lower() and "hello" in words.lower():
        return Unusable(f"{where}: {words}; it is older than the client's protocol: make the client with protocol=2")
    if "unknown command" in words.lower():
        return Unusable(f"{where}: {words}; this server lacks what claims need, or forbids it")
    return OutcomeUnknown(f"{where}: {words}")


def connect_failure(where: str, error: BaseException) -> BackendUnavailable:
    meant = refusal(where, error)
    words = words_of(error)
    if isinstance(meant, BackendUnavailable):
        return meant
    if "invalid database" in words.lower() or "db index" in words.lower():
        return Unusable(f"{where}: {words}; it has no database of this number")
    if "certificate" in words.lower():
        return Unusable(f"{where}: {words}; see ssl_ca_certs and ssl_cert_reqs")
    if "invalid username" in words.lower() or "invalid password" in words.lower():
        return Unusable(f"{where}: {words}; {_WRONG['WRONGPASS']}")
    return BackendUnavailable(f"{where}: {words}")
