"""The key that closes cache events to strangers: ZeroMQ's CURVE, which authenticates both ends and encrypts.

One pair of keys is the secret of a whole fleet: publishers and subscribers hold the same file, in the form that
ZeroMQ's own tools write (`zmq.auth.create_certificates`). Flags, `ps` and /server_info show only its path.
"""

import logging
import stat
from dataclasses import dataclass, field
from typing import Any

import zmq

from bough.core.errors import SettingsError
from bough.core.files import user_path

log = logging.getLogger(__name__)

DOMAIN = "kv-events"
MAKE_ONE = """umask 077; python -c 'import zmq.auth; zmq.auth.create_certificates(".", "kv-events")'"""


@dataclass(frozen=True, slots=True)
class EventKey:
    """Both halves as ZeroMQ writes them (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """For a socket that will listen: only who passes the context's authenticator (`callback`) gets through."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody is let in, instead of everybody

    def present(self, socket: zmq.Socket[Any]) -> None:
        """For a socket that will connect: it shows this key and talks only to who holds it too."""
        socket.curve_publickey = socket.curve_serverkey = self.public
        socket.curve_secretkey = self.secret

    def callback(self, domain: str, public: bytes) -> bool:
        """Whether the authenticator lets a peer with this key in."""
        return public == self.public


def read_key(path: str) -> EventKey:
    from zmq.auth.certs import load_certificate

    file = user_path(path)
    try:
        public, secret = load_certificate(file)
        if secret is not None and zmq.curve_public(secret) == public:
            if file.stat().st_mode & stat.S_IROTH:
                log.warning("every user of this machine can read the key of cache events; `chmod 600 %s`", file)
            return EventKey(public, secret)
        wrong = "it holds no secret key, or one that does not belong to its public key"
    except (OSError, ValueError, zmq.ZMQError) as error:
        wrong = str(error)
    raise SettingsError(
        f"The key of cache events cannot be read from {path}: {wrong}. It is the .key_secret file that "
        f"`{MAKE_ONE}` writes."
    )
