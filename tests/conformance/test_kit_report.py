"""What the documentation says of the kit is what the kit asks: ``docs/kit-report.json``.

python tests/conformance/test_kit_report.py         writes it anew
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery_anarchon.testing.harness import report

FILE = Path(__file__).parents[2] / "docs" / "kit-report.json"

SUITES = {
    "redis:lease": "test_redis.TestRedis7",
    "redis:stream-id": "test_redis_claims.TestStreamIdRedis7",
    "redis:idmp": "test_redis_claims.TestIdmpRedis86",
    "redis:script": "test_redis_claims.TestScriptRedis7",
    "valkey:lease": "test_redis.TestValkey8",
    "valkey:stream-id": "test_redis_claims.TestStreamIdValkey8",
    "valkey:script": "test_redis_claims.TestScriptValkey8",
    "postgres": "test_postgres.TestPostgres",
    "sqlite": "test_sqlite.TestSqlite",
    "libsql": "test_libsql.TestLibsql",
    "rabbitmq": "test_rabbitmq.TestQueue",
    "nats": "test_nats.TestNats",
}
"""The suite whose clauses stand for a store: that of its own connections."""


def asked() -> dict[str, Any]:
    found = {}
    for store, name in SUITES.items():
        module, _, suite = name.partition(".")
        found[store] = report(getattr(importlib.import_module(f"conformance.{module}"), suite))
    return found


def test_the_report_is_what_is_asked() -> None:
    # In a process of its own: here the modules with the suites may be loaded already, by other names.
    done = subprocess.run([sys.executable, __file__, "--show"], capture_output=True, text=True, check=True)
    assert json.loads(FILE.read_text()) == json.loads(done.stdout), (
        f"run python tests/conformance/{Path(__file__).name}, and then python docs/overview.py"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    text = json.dumps(asked(), indent=1, sort_keys=True) + "\n"
    sys.stdout.write(text) if "--show" in sys.argv else FILE.write_text(text)
