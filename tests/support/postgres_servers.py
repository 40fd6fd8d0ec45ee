"""A PostgreSQL of a test's own, and a PgBouncer before it.

The server's programs are those on PATH, of Debian's ``postgresql-NN`` (``/usr/lib/postgresql``), or in the folder that
ANARCHON_TEST_POSTGRES_BIN names. ``initdb`` and the server refuse to be root: then they run as ``postgres``, or nobody.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from servers import Server, free_port, missing, on_path
from support.waiting import wait_for

USER = "tester"

QUICK = ("fsync=off", "full_page_writes=off")
"""What was answered survives a kill of all processes, which is what tests do; a power cut they cannot do."""


def find_postgres() -> Path | None:
    """The folder of ``initdb`` and ``postgres``, or None."""
    named = os.environ.get("ANARCHON_TEST_POSTGRES_BIN")
    found = on_path("initdb")
    folders = [Path(named)] if named else [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name))
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def find_pgbouncer() -> str | None:
    named = os.environ.get("ANARCHON_TEST_PGBOUNCER")
    return named or on_path("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")


def _unprivileged() -> pwd.struct_passwd | None:
    """Who servers run as when the tests are root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    return None


def _as_user(command: Sequence[str]) -> list[str]:
    user = _unprivileged()
    if user is None:
        return list(command)
    ids = ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
    return ["setpriv", *ids, *command]


def _own(path: Path) -> None:
    user = _unprivileged()
    if user is not None:
        os.chown(path, user.pw_uid, user.pw_gid)


class PostgresProcess(Server):
    """``stop`` is a fast shutdown: sessions are ended, what was committed is kept."""

    def stop(self) -> None:
        if self._executor is not None and self.running:
            self.resume()
            self._executor.stop(signal.SIGINT, expected_returncode=0)


@dataclass(eq=False)
class Postgres:
    """A running server, with one superuser that needs no password."""

    port: int
    process: Server
    folder: Path

    @property
    def url(self) -> str:
        return self.at(self.port)

    def at(self, port: int, database: str = "postgres", user: str = USER) -> str:
        return f"postgresql://{user}@127.0.0.1:{port}/{database}"

    def client(self, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True, **options)

    def run(self, *statements: str) -> None:
        with self.client() as client:
            for statement in statements:
                client.execute(statement)

    def wait_until_ready(self) -> None:
        def answers() -> bool:
            with suppress(psycopg.OperationalError), self.client() as client:
                return client.execute("select 1").fetchone() == (1,)
            return False

        wait_for(answers, f"PostgreSQL on port {self.port}", 60)

    def restart(self) -> None:
        self.process.restart()
        self.wait_until_ready()

    def kill(self) -> None:
        """SIGKILL to all of its processes, as when the machine dies."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.process.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "the end of its processes")

    def freeze(self) -> list[int]:
        """SIGSTOP to all of its processes; their ids, for :meth:`thaw`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        processes = [self.process.pid, *map(int, children)]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)
        return processes

    def thaw(self, processes: Sequence[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def log(self) -> str:
        return self.process.log.read_text(errors="replace")


@contextmanager
def private_postgres(folder: Path, options: Sequence[str] = ()) -> Iterator[Postgres]:
    """A server whose data lie in a folder of its own, readable for whom it runs as; its log is in *folder*.

    :param options: settings, as ``name=value``.
    """
    binaries = find_postgres()
    if binaries is None:
        missing("no PostgreSQL: put initdb on PATH, or install Debian's postgresql")
    folder.mkdir(parents=True, exist_ok=True)
    # Not below pytest's folders, into which nobody else may look.
    data = Path(tempfile.mkdtemp(prefix="anarchon-postgres-"))
    try:
        _own(data)
        initdb = [str(binaries / "initdb"), "-D", str(data / "data"), "-U", USER, "-A", "trust", "-E", "UTF8"]
        subprocess.run(
            _as_user([*initdb, "--locale=C.UTF-8", "--no-sync"]), check=True, capture_output=True, cwd=data, timeout=120
        )
        port = free_port()
        settings = (
            f"unix_socket_directories={data}",
            "listen_addresses=127.0.0.1",
            "max_connections=200",
            *QUICK,
            *options,
        )
        command = [str(binaries / "postgres"), "-D", str(data / "data"), "-p", str(port)]
        command += [part for setting in settings for part in ("-c", setting)]
        server = Postgres(port, PostgresProcess(_as_user(command), port, folder), data)
        server.process.start()
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.process.stop()
    finally:
        shutil.rmtree(data, ignore_errors=True)


@contextmanager
def pgbouncer(folder: Path, server: Postgres, pool_size: int = 2) -> Iterator[Server]:
    """A PgBouncer in transaction mode before *server*."""
    binary = find_pgbouncer()
    if binary is None:
        missing("no pgbouncer on PATH, and no ANARCHON_TEST_PGBOUNCER")
    port = free_port()
    place = Path(tempfile.mkdtemp(prefix="anarchon-pgbouncer-"))
    try:
        _own(place)
        users, config = place / "users.txt", place / "pgbouncer.ini"
        users.write_text(f'"{USER}" ""\n')
        config.write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {users}\n"
            f"pool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 500\n"
            "server_login_retry = 0.1\n"
        )
        for file in (users, config):
            file.chmod(0o644)
        bouncer = PostgresProcess(_as_user([binary, str(config)]), port, folder)
        bouncer.log = folder / "pgbouncer.log"
        bouncer.start()
        try:
            yield bouncer
        finally:
            bouncer.stop()
    finally:
        shutil.rmtree(place, ignore_errors=True)
