"""Processes of one's own: each in a session of its own, its output in a file, and none left behind.

Belongs here: starting, signalling and reaping, with the standard library only. Does not belong here: what the processes
are for (the demo, the test kit).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import celery_anarchon

_T = TypeVar("_T")

_CLICKS_OWN = frozenset({"APP", "BROKER_URL", "CONFIG_MODULE", "LOADER", "RESULT_BACKEND", "SKIP_CHECKS", "WORKDIR"})
"""What the ``celery`` command reads from the environment without a prefix."""

_POLL = 0.02


class NotInTime(AssertionError):
    """What had to happen did not. The text ends with what the process wrote last."""


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what would tell another Celery app what to do, and with this very package
    importable wherever the new process starts."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("CELERY_") and name not in _CLICKS_OWN
    }
    paths = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    home = Path(celery_anarchon.__file__).resolve().parent.parent
    if home.name not in ("site-packages", "dist-packages"):
        # A checkout that is only on this process's path.
        paths.append(str(home))
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PYTHONUNBUFFERED"] = "1"
    return {**environment, **more}


def celery_command(app: str, *arguments: str) -> list[str]:
    """``celery -A app ...`` with this interpreter, found on no PATH."""
    return [sys.executable, "-m", "celery", "-A", app, *arguments]


def wait_until(condition: Callable[[], _T | None], timeout: float, what: Callable[[], str]) -> _T:
    """What *condition* returns once it is true.

    :raises NotInTime: with the text of *what*.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        found = condition()
        if found:
            return found
        if late:
            raise NotInTime(f"{what()} within {timeout:g} s")
        time.sleep(_POLL)


class ManagedProcess:
    """A process that we started. Signals go to it, or to it and all its children; never to anybody else."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.cwd = cwd
        self.env = dict(env)
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.start()

    def __repr__(self) -> str:
        return f"<{self.name} pid={self.pid} {'running' if self.running else self.returncode}>"

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, again if it has ended: same command, same environment, log appended."""
        if self.running:
            raise RuntimeError(f"{self.name} (pid {self.pid}) runs already")
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            with _signals_heard():
                self._popen = subprocess.Popen(  # noqa: S603 - our own command line, and no shell
                    self.command,
                    cwd=self.cwd,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """None while it runs; -9 after SIGKILL."""
        return None if self._popen is None else self._popen.poll()

    def send(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process, or to all of its session. Nothing happens when it has ended."""
        try:
            if group:
                # The group outlives its leader where children do.
                os.killpg(self.pid, number)
            elif self.running:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped: nothing of it runs any more."""
        self.send(signal.SIGSTOP)
        wait_until(lambda: self.state in ("T", "t", None), 10, lambda: f"{self.name} did not freeze")

    def thaw(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def kill(self, *, group: bool = False) -> None:
        """SIGKILL, to the process alone (as the kernel does) or to its children too, and reap it."""
        self.send(signal.SIGKILL, group=group)
        self.wait(10)

    def stop(self, timeout: float = 30, *, number: int = signal.SIGTERM) -> int:
        """SIGTERM, then wait; its return code.

        :raises NotInTime: it still runs.
        """
        self.send(number)
        self.thaw()
        return self.wait(timeout)

    def restart(self, timeout: float = 30) -> None:
        """Stop it if it runs, and start it anew."""
        if self.running:
            self.stop(timeout)
        self.start()

    def wait(self, timeout: float = 15) -> int:
        """Wait for its end; its return code.

        :raises NotInTime: it still runs.
        """
        assert self._popen is not None
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise NotInTime(f"{self.name} did not end within {timeout:g} s; it wrote:\n{self.tail()}") from None

    def end(self, timeout: float = 5) -> None:
        """Get rid of it and of whatever it started: it may end by itself within *timeout*, then SIGKILL to the group.
        Raises nothing."""
        try:
            self.wait(timeout)
        except NotInTime:
            pass
        self.send(signal.SIGKILL, group=True)
        if self._popen is not None:
            self._popen.wait()

    @property
    def state(self) -> str | None:
        """The kernel's letter for what it does (``S`` sleeps, ``T`` is frozen); None: ended, or no /proc here."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        return text.rpartition(")")[2].split()[0]

    # --- its output ---------------------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """What it wrote since it was started last."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def lines(self) -> Iterator[str]:
        yield from self.output.splitlines()

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.output.splitlines()[-lines:])

    def has_written(self, pattern: str) -> bool:
        """Whether the regular expression matches in its output so far."""
        return re.search(pattern, self.output, re.MULTILINE) is not None

    def wait_for_log(self, pattern: str, timeout: float = 60, *, times: int = 1) -> re.Match[str]:
        """Wait until it has written *pattern* (a regular expression) *times* times; the last of those matches.

        :raises NotInTime: it did not, or ended before.
        """

        def found() -> re.Match[str] | None:
            # In this order: what it wrote before its end must be seen.
            ended = not self.running
            matches = list(re.finditer(pattern, self.output, re.MULTILINE))
            if len(matches) >= times:
                return matches[times - 1]
            if ended:
                words = f"{self.name} ended ({self.returncode}) without having written {pattern!r}"
                raise NotInTime(f"{words}; it wrote:\n{self.tail()}")
            return None

        return wait_until(
            found, timeout, lambda: f"{self.name} did not write {pattern!r}; it wrote:\n{self.tail()}\n... all this"
        )


class ProcessGroup:
    """Processes that end together. A context manager: whatever happens inside, none of them outlives it."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = dict(env)
        self.processes: dict[str, ManagedProcess] = {}

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> ManagedProcess:
        return self.processes[name]

    def start(self, name: str, command: Sequence[str], **env: str) -> ManagedProcess:
        """Start *command* under a name of its own; its output goes to ``<folder>/<name>.log``."""
        if name in self.processes:
            raise ValueError(f"there is a process called {name!r} already; restart() that one")
        process = ManagedProcess(
            name,
            command,
            log=self.folder / f"{name}.log",
            cwd=self.folder,
            env={**self.env, **env},
        )
        self.processes[name] = process
        return process

    def close(self, timeout: float = 5) -> None:
        """End all of them. Repeatable."""
        for process in self.processes.values():
            process.send(signal.SIGTERM)
            process.thaw()
        for process in self.processes.values():
            process.end(timeout)


@contextmanager
def _signals_heard() -> Iterator[None]:
    """Within: SIGINT and SIGQUIT are not ignored, so that a new process does not inherit that. (Shells start background
    jobs with these two ignored.) A handler is enough: the new program begins without it."""
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGQUIT)
        if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    ]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
