"""The server's OpenAPI document, without a server: the routes are declared over the scripted engine of the tests.

`python -m tools.openapi` prints it. It is `/openapi.json` of a server without keys and without a root path.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from bough.core.server_settings import ServerSettings
from bough.server.protocols import all_endpoints, openapi_document
from tests.server.native_engine import NativeEngine


def document() -> dict[str, Any]:
    """With a fingerprint of all but the version: a release that changes no route makes no client stale."""
    endpoints = all_endpoints(NativeEngine(lambda _: None).context())
    made: dict[str, Any] = openapi_document(endpoints, ServerSettings())
    routes = {name: part for name, part in made.items() if name != "info"}
    made["info"]["x-fingerprint"] = hashlib.sha256(json.dumps(routes, sort_keys=True).encode()).hexdigest()[:16]
    return made


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
