"""Where a Redis or Valkey is: URLs and mappings read into an :class:`Address`.

Belongs here: forms of addresses and the refusal of wrong ones. Does not belong here: sockets (:mod:`.links`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

from celery_anarchon.backends.registry import masked, read_flag, read_url
from celery_anarchon.errors import ConfigurationError

__all__ = ["DRIVER_OPTIONS", "Address", "Host", "celery_address", "read_address", "split_url"]

Host = tuple[str, int]

_KINDS = {"": "server", "s": "server", "+socket": "socket", "+sentinel": "sentinel", "+cluster": "cluster"}
_SCHEME = re.compile(r"(?:(?P<product>redis|valkey)(?P<tls>s?)(?P<kind>(?:\+(?:socket|sentinel|cluster))?)|sentinel)")
_PORTS = {"server": 6379, "sentinel": 26379, "cluster": 6379}


def _certificates(text: str) -> str:
    # Celery's own settings write CERT_REQUIRED.
    plain = text.lower().removeprefix("cert_")
    if plain not in ("none", "optional", "required"):
        raise ValueError(f"expected required, optional or none, not {text!r}")
    return plain


_CERTIFICATES = {0: "none", 1: "optional", 2: "required", None: "none"}
"""The constants of Python's ssl module, which Celery's settings take too."""

DRIVER_OPTIONS: dict[str, Callable[[str], Any]] = {
    "db": int,
    "virtual_host": int,
    "username": str,
    "password": str,
    "master_name": str,
    "sentinel_username": str,
    "sentinel_password": str,
    "ssl": read_flag,
    "ssl_cert_reqs": _certificates,
    "ssl_ca_certs": str,
    "ssl_ca_path": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "ssl_check_hostname": read_flag,
    "ssl_ciphers": str,
    "socket_timeout": float,
    "socket_connect_timeout": float,
    "socket_keepalive": read_flag,
}
"""What a URL's query may say to the driver, and how it is read."""

_OURS = frozenset({"db", "virtual_host", "username", "password", "master_name", "ssl"})
_TO_SENTINELS = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True)
class Address:
    """One server, a socket, the sentinels that know it, or some nodes of a cluster."""

    kind: str
    """``server``, ``socket``, ``sentinel`` or ``cluster``."""
    text: str
    """For logs and errors: no secrets."""
    hosts: tuple[Host, ...] = ()
    path: str = ""
    db: int = 0
    master_name: str = ""
    tls: bool = False
    login: Mapping[str, str] = field(default_factory=dict, repr=False)
    """``username`` and ``password``, as far as given."""
    sentinel_login: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further options of the driver's connections."""


def split_url(url: str, known: Mapping[str, Callable[[str], Any]], options: Mapping[str, Any]) -> Any:
    """The :class:`Address` that *url* names, and those of its options and of *options* that are in *known*."""
    _, given = read_url(url, {**DRIVER_OPTIONS, **known}, options)
    ours = {name: given.pop(name) for name in known if name in given}
    return _address_of_url(url, given), ours


def read_address(value: Any, product: str) -> Address:
    """The address that a URL, or a mapping of connection options, means.

    :raises ConfigurationError: it means none; the text names the fix and no secret.
    """
    if isinstance(value, Address):
        return value
    if isinstance(value, str):
        if "://" not in value:
            raise ConfigurationError(f"{masked(value)!r} is no URL: expected {product}://host:port/db")
        return split_url(value, {}, {})[0]  # type: ignore[no-any-return]
    if isinstance(value, Mapping):
        return _address_of_mapping({str(name): setting for name, setting in value.items()}, product)
    raise ConfigurationError(
        f"{product}=... takes a URL, a mapping of connection options or a client, not "
        f"{type(value).__module__}.{type(value).__qualname__}"
    )


def celery_address(url: str, transport_options: Mapping[str, Any], use_ssl: Any) -> Address:
    """The address of a broker or result backend as Celery is told it: what only concerns messages is left out, and what
    stands in other settings of Celery is added."""
    place, _, query = url.partition("?")
    given: dict[str, Any] = {name: value for name, value in parse_qsl(query) if name in DRIVER_OPTIONS}
    if transport_options.get("master_name"):
        given.setdefault("master_name", str(transport_options["master_name"]))
    for name, value in dict(transport_options.get("sentinel_kwargs") or {}).items():
        if name in ("username", "password"):
            given[f"sentinel_{name}"] = value
    if use_ssl:
        given["ssl"] = True
        for name, value in use_ssl.items() if isinstance(use_ssl, Mapping) else ():
            if name in DRIVER_OPTIONS:
                given[name] = _CERTIFICATES.get(value, value) if name == "ssl_cert_reqs" else value
    return split_url(place.rstrip("/"), {}, given)[0]  # type: ignore[no-any-return]


def _address_of_url(url: str, given: dict[str, Any]) -> Address:
    scheme, _, rest = url.partition("://")
    form = _SCHEME.fullmatch(scheme.lower())
    if form is None:
        raise ConfigurationError(
            f"{masked(url)}: unknown scheme {scheme}://; expected redis://, rediss://, valkey:// or "
            "valkeys://, or one of them with +socket, +sentinel or +cluster"
        )
    kind = "sentinel" if form["kind"] is None else _KINDS[form["kind"]]
    # Celery's own form repeats scheme, login and database with each sentinel.
    body = re.sub(f"(?:/\\d*)?([,;]){re.escape(scheme)}://", r"\1", rest.partition("?")[0])
    login, place = _login(kind, body)
    user, colon, password = login.partition(":")
    if "password" in given and colon:
        raise ConfigurationError(f"{masked(url)}: the password is given twice")
    given = {**({"username": unquote(user)} if user else {}), **given}
    given = {**({"password": unquote(password)} if colon and password else {}), **given}
    given["ssl"] = given.get("ssl", False) or bool(form["tls"])
    text = masked(url).partition("?")[0]
    if kind == "socket":
        path = unquote(place)
        if not path.startswith("/"):
            raise ConfigurationError(
                f"{masked(url)}: give the absolute path of the socket, as in {form['product']}+socket:///run/redis.sock"
            )
        return _address(kind, text, (), given, path=path)
    hosts, _, db = place.partition("/")
    if db:
        if not db.isdecimal() or "db" in given or "virtual_host" in given:
            raise ConfigurationError(f"{masked(url)}: give the number of one database after the host, as in /0")
        given["db"] = int(db)
    if kind == "server" and re.search("[,;]", hosts):
        raise ConfigurationError(
            f"{masked(url)} names several hosts: write {form['product']}+sentinel:// where they are sentinels, "
            f"{form['product']}+cluster:// where they are nodes of a cluster"
        )
    parts = [part for part in re.split("[,;]", hosts) if part] or ["localhost"]
    return _address(kind, text, [_host(part, _PORTS[kind], masked(url)) for part in parts], given)


def _login(kind: str, body: str) -> tuple[str, str]:
    """The login, and what comes after it."""
    parts = re.split("[,;]", body)
    with_login = [part.rpartition("@") for part in parts if "@" in part]
    if kind in ("sentinel", "cluster") and len(with_login) > 1:
        return with_login[0][0], ";".join(part.rpartition("@")[2] for part in parts)
    login, _, place = body.rpartition("@")
    return login, place


def _address_of_mapping(given: dict[str, Any], product: str) -> Address:
    if "url" in given:
        url = given.pop("url")
        if not isinstance(url, str):
            raise ConfigurationError(f"{product}={{'url': ...}} must be a text")
        return split_url(url, {}, given)[0]  # type: ignore[no-any-return]
    places = {"host", "port", "path", "sentinels", "nodes"}
    for name in given:
        if name not in places and name not in DRIVER_OPTIONS:
            known = ", ".join(sorted({"url", *places, *DRIVER_OPTIONS}))
            raise ConfigurationError(f"{product}={{...}}: unknown option {name!r}; known are {known}")
    kinds = {"path": "socket", "sentinels": "sentinel", "nodes": "cluster"}
    found = [name for name in kinds if name in given]
    if len(found) > 1 or (found and ("host" in given or "port" in given)):
        raise ConfigurationError(f"{product}={{...}}: give one of host and port, path, sentinels and nodes")
    host, port = given.pop("host", "localhost"), given.pop("port", 6379)
    if not found:
        return _address("server", f"{product}://{host}:{port}", [(str(host), int(port))], given)
    kind, value = kinds[found[0]], given.pop(found[0])
    if kind == "socket":
        return _address(kind, f"{product}+socket://{value}", (), given, path=str(value))
    hosts = [
        _host(one, _PORTS[kind], f"{product}={{...}}") if isinstance(one, str) else (str(one[0]), int(one[1]))
        for one in ([value] if isinstance(value, str) else value)
    ]
    text = ",".join(f"{host}:{port}" for host, port in hosts)
    return _address(kind, f"sentinel://{text}" if kind == "sentinel" else f"{product}+cluster://{text}", hosts, given)


def _address(kind: str, text: str, hosts: Sequence[Host], given: dict[str, Any], path: str = "") -> Address:
    db = given.get("db", given.get("virtual_host", 0))
    if kind == "sentinel" and not given.get("master_name"):
        raise ConfigurationError(f"{text}: say which master the sentinels watch, as in ?master_name=mymaster")
    if kind != "sentinel" and "master_name" in given:
        raise ConfigurationError(f"{text}: master_name is for sentinel:// only")
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ConfigurationError(
            f"{text}: ssl_keyfile goes with ssl_certfile: give both, or the latter with both in it"
        )
    if kind == "cluster" and db:
        raise ConfigurationError(f"{text}: a cluster has database 0 only; keep services apart with prefix=...")
    return Address(
        kind=kind,
        text=text + (f", master {given['master_name']}" if kind == "sentinel" else ""),
        hosts=tuple(hosts),
        path=path,
        db=int(db),
        master_name=given.get("master_name", ""),
        tls=bool(given.get("ssl", False)),
        login={name: given[name] for name in ("username", "password") if given.get(name)},
        sentinel_login={plain: given[name] for name, plain in _TO_SENTINELS.items() if given.get(name)},
        options={name: value for name, value in given.items() if name not in _OURS and name not in _TO_SENTINELS},
    )


def _host(text: str, port: int, shown: str) -> Host:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(?::(\d+))?", text)
    if found is None:
        raise ConfigurationError(f"{shown}: expected host:port")
    return unquote(found[1].strip("[]")) or "localhost", int(found[2] or port)
