"""The tooling under the demo and the test kit: processes do what they are told, and none is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from celery_anarchon.cli.processes import ManagedProcess, NotInTime, ProcessGroup, clean_environment, wait_until

COUNTS = """
import itertools, sys, time
print("up", *sys.argv[1:])
for number in itertools.count():
    print("number", number, flush=True)
    time.sleep(0.01)
"""

FORKS = """
import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"child {os.getpid()}", flush=True)
while True:
    time.sleep(60)
"""

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def python(group: ProcessGroup, code: str, name: str = "one") -> ManagedProcess:
    return group.start(name, [sys.executable, "-c", code])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_life(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, clean_environment()) as group:
        one = python(group, COUNTS)
        assert group["one"] is one and one.running and one.returncode is None
        assert one.wait_for_log(r"number (\d+)", times=3)[1] == "2"
        first = one.pid
        assert one.stop() == -signal.SIGTERM
        assert (one.running, one.returncode) == (False, -signal.SIGTERM)
        one.restart()
        assert one.pid != first
        one.wait_for_log("^number 1$")
        assert one.output.startswith("up"), "only what was written since the start"
        assert one.log.read_text().count("up") == 2
        with pytest.raises(RuntimeError, match="runs already"):
            one.start()
        with pytest.raises(ValueError, match="already"):
            python(group, COUNTS)
        one.kill()
        assert one.returncode == -signal.SIGKILL
        one.send(signal.SIGTERM)  # nothing, and nobody else's trouble


def test_frozen_it_does_nothing(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, clean_environment()) as group:
        one = python(group, COUNTS)
        one.wait_for_log("number 1")
        one.freeze()
        before = one.output
        assert one.state == "T"
        time.sleep(0.2)
        assert one.output == before
        one.thaw()
        wait_until(lambda: one.output != before, 10, lambda: "no output")
        one.freeze()
        assert one.stop() == -signal.SIGTERM, "also from its sleep"


def test_nothing_outlives_the_group(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, clean_environment()) as group:
        parent = python(group, FORKS)
        child = int(parent.wait_for_log(r"child (\d+)")[1])
        stubborn = python(group, STUBBORN, "stubborn")
        stubborn.wait_for_log("up")
        python(group, COUNTS, "frozen").freeze()
        group.close(timeout=0.5)
        assert not any(process.running for process in group.processes.values())
        wait_until(lambda: not alive(child), 10, lambda: "the child lives")


def test_nothing_outlives_an_error(tmp_path: Path) -> None:
    started: list[ManagedProcess] = []

    def fail() -> None:
        with ProcessGroup(tmp_path, clean_environment()) as group:
            started.append(python(group, COUNTS))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not started[0].running


def test_what_does_not_happen_is_told_with_the_log(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, clean_environment()) as group:
        one = python(group, STUBBORN)
        one.wait_for_log("up")
        with pytest.raises(NotInTime, match=r"did not write 'never'.*\nup"):
            one.wait_for_log("never", 0.1)
        with pytest.raises(NotInTime, match=r"did not end within 0.1 s.*\nup"):
            one.stop(0.1)
        one.kill()
        with pytest.raises(NotInTime, match=r"ended \(-9\) without"):
            one.wait_for_log("never")
        assert one.wait_for_log("up")


def test_an_ignored_interrupt_is_not_inherited(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ProcessGroup(tmp_path, clean_environment()) as group:
            one = python(group, COUNTS)
            one.wait_for_log("up")
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            one.stop(number=signal.SIGINT)
            assert "KeyboardInterrupt" in one.output
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CELERY_ANARCHON_BACKEND", "CELERY_BROKER_URL", "BROKER_URL", "APP", "WORKDIR"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("PYTHONPATH", f"here{os.pathsep}/there")
    environment = clean_environment(MINE="1")
    assert "theirs" not in environment.values()
    assert environment["MINE"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[:2] == [str(tmp_path / "here"), "/there"]
