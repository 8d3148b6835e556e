"""The sockets of a server, and the names under which clients may address it.

In: --host and --port. Out: bound sockets, before a model is loaded, or a sentence that says why there are none.
"""

import errno
import ipaddress
import socket
from collections.abc import Sequence

from nanoinfer.errors import InvalidValueError, NanoinferError


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of a host. They do not listen yet, so clients are refused until the model is loaded.

    Raises:
        InvalidValueError: the host is not an address of this machine.
        NanoinferError: the port is in use, or not allowed.
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
