"""Hosts whose clocks are wrong: a library for real beats, built from ``clock_shift.c`` with this machine's compiler."""

from __future__ import annotations

import atexit
import functools
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from servers import missing, on_path

SOURCE = Path(__file__).with_name("clock_shift.c")


@functools.cache
def _library() -> Path:
    compiler = on_path("cc") or on_path("gcc") or on_path("clang")
    if compiler is None:
        missing("no C compiler on PATH, so no clock can be shifted")
    folder = Path(tempfile.mkdtemp(prefix="clock-shift-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built = folder / "clock_shift.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return built


class ShiftedClock:
    """The wall clock of one process that is started with :attr:`env`; it can be set while that runs."""

    def __init__(self, folder: Path, name: str, seconds: int = 0) -> None:
        self._file = folder / f"{name}.clock"
        self._file.write_bytes(struct.pack("q", seconds))
        self.env = {"LD_PRELOAD": str(_library()), "CLOCK_SHIFT_FILE": str(self._file)}

    def set(self, seconds: int) -> None:
        """Be off by *seconds* from now on."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))

    def check(self, seconds: int) -> None:
        """That a new process is fooled by it."""
        told = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time(), time.monotonic())"],
            env=self.env,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        wall, monotonic = map(float, told.stdout.split())
        assert abs(wall - time.time() - seconds) < 30
        assert abs(monotonic - time.monotonic()) < 30
