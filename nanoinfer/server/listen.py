"""The sockets of a server, its certificate, and the names under which clients may address it.

In: options of `nanoinfer serve`. Out: bound sockets, before a model is loaded, or a sentence that says why there are none.
"""

import errno
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from nanoinfer.errors import InvalidValueError, NanoinferError


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of a host. They do not listen yet, so clients are refused until the model is loaded.

    Raises: InvalidValueError if the host is not an address of this machine, or NanoinferError if the port cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidValueError(f"--host {host!r} is not known ({error}); give an address of this machine") from error
    sockets: list[socket.socket] = []
    reason: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            bound = socket.socket(family, kind, protocol)
        except OSError as error:  # this kind of address is not enabled
            reason = error
            continue
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port may have lingering connections
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # 0.0.0.0 has a socket of its own
        try:
            bound.bind(address)
            sockets.append(bound)
        except OSError as error:
            bound.close()
            reason = error
            if error.errno != errno.EADDRNOTAVAIL:
                while sockets:
                    sockets.pop().close()
                break
    if not sockets:
        assert reason is not None, "a host has an address"
        raise cannot_listen(host, port, reason)
    return sockets


def bind_uds(path: str) -> socket.socket:
    """Bind a Unix socket to a path, which the caller removes at the end. The umask decides who may connect.

    Raises: NanoinferError if another server listens there, or the path cannot be used.
    """
    bound = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket() and bound.connect_ex(path) == errno.ECONNREFUSED:  # a server that was killed has left it
            os.unlink(path)
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise NanoinferError(f"--uds {path!r} cannot be used ({error.strerror or error}); choose another path") from error
    return bound


def read_certificate(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """Return the settings of https. None: there is no certificate, for http. Raises: InvalidValueError for unusable files."""
    if certfile is None:
        if keyfile is not None:
            raise InvalidValueError(f"--ssl-keyfile {keyfile!r} needs --ssl-certfile; add it, or leave both out")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as error:
        files = f"--ssl-certfile {certfile!r}" + (f" and --ssl-keyfile {keyfile!r}" if keyfile else "")
        raise InvalidValueError(f"{files} cannot be used ({error}); give a certificate and its key as PEM files") from error
    return context


def url_of(bound: socket.socket, *, is_https: bool) -> str:
    """Return the URL under which this machine reaches a socket, or the path of a Unix socket.

    >>> with bind("127.0.0.1", 0)[0] as bound:
    ...     url_of(bound, is_https=True)  # doctest: +ELLIPSIS
    'https://127.0.0.1:...'
    """
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if is_https else 'http'}://{host}:{port}"


def cannot_listen(host: str, port: int, error: OSError) -> NanoinferError:
    """Return the error for a host and a port on which a server cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return NanoinferError(f"port {port} is in use; stop the other server, or choose another --port (0 is any free one)")
    if error.errno == errno.EACCES:
        return NanoinferError(f"port {port} is not allowed for this user; choose a --port of 1024 or more")
    if error.errno == errno.EADDRNOTAVAIL:
        return InvalidValueError(f"--host {host!r} is not an address of this machine; 0.0.0.0 is every interface")
    return NanoinferError(f"the server cannot listen on {host}, port {port}: {error.strerror or error}")


def host_names(host: str, further: Sequence[str]) -> Sequence[str]:
    """Return the names that requests may address: this machine's, the given host, and further names."""
    return "localhost", socket.gethostname(), host, *further


def is_allowed(host_header: str, names: Sequence[str]) -> bool:
    """Whether a Host header has one of these names, or is an address, to which no DNS server can map another name.

    Otherwise a page whose name maps to 127.0.0.1 (DNS rebinding) could read the answers of a server without a key.

    >>> is_allowed("[::1]:8000", ()), is_allowed("LocalHost:8000", ("localhost",)), is_allowed("evil.example", ("localhost",))
    (True, True, False)
    """
    name = host_header.partition("]")[0].removeprefix("[") if host_header.startswith("[") else host_header.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "*" in names or name.lower().removesuffix(".") in map(str.lower, names)
    return True
