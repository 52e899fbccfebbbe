"""Files: where Bough keeps what it has fetched or made, what processes hand over, tables of constants, and files of
configuration: YAML with a mapping at its top, and one sentence for whatever is wrong with it."""

import contextlib
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bough.core.errors import SettingsError

SHARED = Path("/dev/shm")


def home() -> Path:
    """`BOUGH_HOME`, or `bough` in the user's cache folder: models, packed weights, compiled kernels, traces."""
    chosen = os.environ.get("BOUGH_HOME")
    if chosen:
        return user_path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = user_path(cache or "~/.cache")
    if folder.parts[:1] == ("~",):
        raise SettingsError("Neither HOME nor the system's list of users names your home folder; set BOUGH_HOME.")
    return folder / "bough"


def user_path(text: str) -> Path:
    """With the home folder of a user who is named by `~`; as it is where there is no such user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  (Path's own raises)


@contextlib.contextmanager
def shared_file(nbytes: int) -> Iterator[str]:
    """An empty file that no other user can read, in shared memory where that has room; it is removed afterwards."""
    roomy = SHARED.is_dir() and shutil.disk_usage(SHARED).free > nbytes + (1 << 20)
    with tempfile.NamedTemporaryFile(prefix="bough-", dir=SHARED if roomy else None) as file:
        yield file.name


def table_beside(module: str, name: str) -> dict[str, Any]:
    """The TOML table `name` in the folder of the module, which gives its `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def read_yaml(file: str) -> dict[Any, Any]:
    import yaml  # only for those who have such a file

    try:
        content = yaml.safe_load(user_path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"Cannot read the configuration file {file}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{file} is not a YAML file: it is not UTF-8 text.") from None
    except RecursionError:
        raise SettingsError(f"{file} is nested too deep to be read.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        raise SettingsError(f"{file} is not a YAML file: {reason}{where}.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{file} must hold settings as `name: value` lines, such as `page-size: 16`.")
    return content
