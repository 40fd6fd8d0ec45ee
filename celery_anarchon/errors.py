"""The one exception tree.

Belongs here: every exception that the package raises on purpose, and what a caller should do about each.
Does not belong here: logic. "Somebody else won this slot" is a value (:class:`celery_anarchon.model.Answer`),
never an exception.
"""

from __future__ import annotations


class AnarchonError(Exception):
    """The root of all errors that the package raises on purpose."""


class ConfigurationError(AnarchonError):
    """A definition, a setting or an environment that cannot work. Stop at start and show the text: it names the fix."""


class OptionError(ConfigurationError, TypeError):
    """A job option with an unknown name, a wrong value, or one that this backend cannot honour."""


class LayoutMismatch(ConfigurationError):
    """The store holds records of a newer layout, or of another app. Refuse to start."""


class BackendUnavailable(AnarchonError):
    """The store did not answer and nothing was applied. Send nothing; ask again later."""


class OutcomeUnknown(AnarchonError):
    """The store may or may not have applied the call. Ask again as the same owner; never read it as "taken"."""


class LeaseLost(AnarchonError):
    """Another process has taken the run over. Stop, and write nothing more."""
