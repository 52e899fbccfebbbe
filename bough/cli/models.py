"""`bough models`: what the catalogue holds and what of it is on disk; pulls and removes by name. Also, which
architectures can be served.

Only the catalogue is asked; no model is opened, so the list appears at once.
"""

from collections.abc import Sequence

from bough.cli.commands import Parser, did_you_mean
from bough.core.errors import ModelError, SettingsError
from bough.loader import catalogue
from bough.models.registry import supported_architectures

ACTIONS = ("list", "pull", "rm")


def run(argv: Sequence[str]) -> int:
    usage = "[list | pull NAME | rm NAME | --supported]"
    parser = Parser(program="bough models", usage=usage, about="Lists, pulls and removes models.")
    parser.add_argument("action", nargs="?", default="list", metavar="ACTION", help="list (the default), pull or rm")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a model of the list, or one of its short names")
    parser.add_argument("--supported", action="store_true", help="list the architectures that can be served instead")
    parsed = parser.parse(argv)
    if parsed.supported:
        print(*supported_architectures(), sep="\n")
        return 0
    if parsed.action not in ACTIONS:
        hint = did_you_mean(parsed.action, ACTIONS) or f" Choose one of {', '.join(ACTIONS)}."
        raise SettingsError(f"unknown action {parsed.action!r}.{hint}")
    if parsed.action == "list":
        if parsed.name is not None:
            raise SettingsError("`bough models list` takes no name; it shows all models.")
        print(_table())
        return 0
    if parsed.name is None:
        raise SettingsError(f"Say which model: `bough models {parsed.action} {catalogue.DEFAULT.name}`.")
    entry = _find(parsed.name)
    print(_pull(entry) if parsed.action == "pull" else _remove(entry))
    return 0


def _table() -> str:
    rows = [("NAME", "SIZE", "LICENCE", "ON DISK")]
    for entry in catalogue.ENTRIES:
        path = catalogue.local_path(entry)
        name = f"{entry.name} (default)" if entry is catalogue.DEFAULT else entry.name
        rows.append((name, _megabytes(entry.size), entry.licence, str(path or "not fetched")))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:<{widths[0]}}  {size:>{widths[1]}}  {licence:<{widths[2]}}  {place}"
        for name, size, licence, place in rows
    ]
    return "\n".join([*lines, "", f"Models are kept in {catalogue.home() / 'models'} (set BOUGH_HOME to move them)."])


def _pull(entry: catalogue.Entry) -> str:
    path = catalogue.local_path(entry)
    if path is not None:
        return f"{entry.name} is on disk already: {path}"
    return f"{entry.name} is ready: {catalogue.pull(entry)}"


def _remove(entry: catalogue.Entry) -> str:
    freed = catalogue.remove(entry)
    return f"Removed {entry.name}, {_megabytes(freed)}." if freed else f"{entry.name} is not on disk."


def _find(name: str) -> catalogue.Entry:
    entry = catalogue.find(name)
    if entry is None:
        hint = did_you_mean(name, catalogue.KNOWN)
        raise ModelError(f"The catalogue has no model {name!r} (it has: {catalogue.NAMES}).{hint}")
    return entry


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
