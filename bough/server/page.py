"""The files of the page at /ui, which are open to all and the same on a server and on a gateway."""

import functools
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bough.server.errors import HttpError

FOLDER = Path(__file__).parent / "ui"  # made by `make ui` of clients/ui
TYPES = {".html": "html", ".js": "javascript", ".css": "css"}
# Nothing but this server's own files runs, and nothing is asked of other hosts. Images are those that a user attaches.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
INDEX = "index.html"
zipped = functools.cache(gzip.compress)  # of a file's body


class PageFile(NamedTuple):
    body: bytes
    headers: Mapping[str, str]


@functools.cache
def page_files() -> dict[str, PageFile]:
    return {
        file.name: PageFile(file.read_bytes(), {"content-type": f"text/{TYPES[file.suffix]}; charset=utf-8", **HEADERS})
        for file in FOLDER.iterdir()
        if file.suffix in TYPES
    }


def page_file(name: str) -> PageFile:
    found = page_files().get(name)
    if found is None:
        raise HttpError(404, f"The page has no file {name!r}.", "NotFoundError")
    return found
