"""What the processes of a server listen on, as the kernel knows it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import psutil

LOOPBACK = "127.0.0.1"
LISTENING = 0x10000  # __SO_ACCEPTCON, among the flags in /proc/net/unix


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def tree_of(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def inet_listeners(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Addresses on which something can be sent to them from outside: TCP that listens, UDP that is bound."""
    found = set()
    for process in processes:
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and not each.raddr):
                found.add((each.laddr.ip.removeprefix("::ffff:"), each.laddr.port))  # IPv4, seen through IPv6
    return found


def unix_listeners(processes: list[psutil.Process]) -> set[str]:
    """Names of their listening unix sockets; those of the abstract namespace begin with @."""
    inodes = {inode for process in processes for inode in _socket_inodes(process.pid)}
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split(maxsplit=7)
        if int(flags, 16) & LISTENING and inode in inodes:
            found.add(name[0] if name else "")
    return found


def private_names(processes: list[psutil.Process]) -> set[str]:
    """The names of their unix sockets, all of which lie in folders that nobody else may enter."""
    paths = [Path(name) for name in unix_listeners(processes)]
    for path in paths:
        assert path.is_absolute(), f"{path} is open to everybody: it has no folder"
        status = path.parent.stat()
        assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.getuid()), path
    return {path.name for path in paths}


def reached_from_outside(ports: set[int]) -> set[tuple[str, int]]:
    """A port scan of this machine's addresses but loopback: those of the ports that answer there."""
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        (each.family, each.address)
        for card in psutil.net_if_addrs().values()
        for each in card
        if each.family in families and not each.address.startswith("127.") and each.address != "::1"
    }
    found = set()
    for family, address in addresses:
        for port in ports:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(5.0)
                if probe.connect_ex((address, port)) == 0:
                    found.add((address, port))
    return found


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(entry.readlink()))
    return {target[len("socket:[") : -1] for target in found if target.startswith("socket:[")}
