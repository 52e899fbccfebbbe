"""The socket that the server listens on, opened before anything slow happens, so that its errors come first."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from pathlib import Path

from bough.core.errors import SettingsError
from bough.core.settings import ServerSettings

BACKLOG = 2048


def open_listener(settings: ServerSettings) -> socket.socket:
    """A listening socket: TCP over IPv4 or IPv6, or a unix socket."""
    listener = _unix_socket(Path(settings.uds)) if settings.uds else _tcp_socket(settings.host, settings.port)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Where clients on this machine find the server."""
    scheme = "https" if settings.ssl_certfile else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}+unix://{settings.uds}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether it is bound to a TCP address that only programs on this machine reach, browsers among them."""
    if listener.family == socket.AF_UNIX:
        return False
    address = ipaddress.ip_address(listener.getsockname()[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _tcp_socket(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise SettingsError(f"--host {host} is not an address of this machine: {error.strerror}.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # all addresses, those of IPv4 too
        listener.bind(address)
        # The kernel sends each event at once: waiting to fill a packet would hold tokens back.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> SettingsError:
    if error.errno == errno.EADDRINUSE:
        return SettingsError(f"Port {port} on {host} is in use; choose another with --port, or end what listens there.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return SettingsError(f"This user may not listen on port {port}; choose one above 1023 with --port.")
    return SettingsError(f"Cannot listen on {host} port {port}: {error.strerror}.")


def _unix_socket(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()  # left behind by a server that was killed
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(f"The socket {path} is in use; choose another with --uds.") from None
        raise SettingsError(f"Cannot listen on the unix socket {path}: {error.strerror or error}.") from None
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(os.fspath(path)) == 0
