"""One setting: what its field says of it, and whether a value can be used. `settings` has them all."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import PurePath
from typing import Any

from bough.core.errors import SettingsError, nearest
from bough.core.files import table_beside

TYPE_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
TABLES = table_beside(__file__, "settings.toml")
INSTEAD: dict[str, dict[str, str]] = {  # by setting, what to do instead of other engines' values
    name: {value: text for text, values in hints.items() for value in values.split()}
    for name, hints in TABLES["instead"].items()
}
OURS = {name: own for own, names in TABLES["theirs"].items() for name in names.split()}  # by other engines' names
HELP: dict[str, str] = {name: text for group in TABLES["help"].values() for name, text in group.items()}
NUMBERS: dict[str, type] = {"int": int, "float": float}
SECRETS = ("api_key", "admin_api_key", "worker_api_key")  # never shown, neither in logs nor by `get_server_info`


def setting(
    default: Any,
    help: str = "",
    *,
    choices: tuple[Any, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    many: bool = False,
    as_json: bool = False,
) -> Any:
    """A field with what the command line and the checks need to know of it: see `help_of` for its `help`. Of `many`, a
    list is kept as JSON, and an object of `as_json`."""
    meta = {"help": help, "choices": choices, "low": low, "high": high}
    return field(default=default, metadata={**meta, "many": many, "as_json": as_json})


def help_of(f: dataclasses.Field[Any]) -> str:
    """What a setting is for: `settings.toml` says it where the field does not."""
    return f.metadata["help"] or HELP[f.name]


def field_type(f: dataclasses.Field[Any]) -> tuple[type, bool]:
    """The plain type of a setting, and whether None is allowed."""
    name, _, more = str(f.type).partition(" | ")  # annotations are text, because their modules postpone them
    return {"str": str, "int": int, "float": float, "bool": bool}[name], more == "None"


def check_value(f: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the setting's own type, or an error that names the setting and what it takes."""
    plain, optional = field_type(f)
    if value is None:
        return f.default if not optional else None
    meta = f.metadata
    if meta["choices"] == (f.default,) and value != f.default:
        text = f"{f.name}: {help_of(f)}; leave it out or at {f.default!r}, got {value!r}."
        raise SettingsError(text)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if meta["many"] and isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    if meta["many"] and isinstance(value, list | tuple):
        value = json.dumps(value, default=str) if len(value) != 1 or isinstance(value[0], Mapping) else value[0]
    if meta["as_json"] and isinstance(value, Mapping):
        value = json.dumps(value, default=str)
    if plain is str and isinstance(value, PurePath):
        value = str(value)
    if not isinstance(value, plain) or (plain is int and isinstance(value, bool)):
        raise SettingsError(f"{f.name} must be {TYPE_WORDS[plain]}, got {value!r}.")
    if f.name in SECRETS and not str(value).strip():
        raise SettingsError(f"{f.name} is empty, which would guard nothing; give a key, or leave it out.")
    if isinstance(value, str) and value.replace("-", "_") in (meta["choices"] or ()):
        value = value.replace("-", "_")  # as flags may have either
    if meta["choices"] is not None and value not in meta["choices"]:
        near = nearest(value, meta["choices"]) if isinstance(value, str) else None
        hint = INSTEAD.get(f.name, {}).get(value) or (f"Did you mean {near!r}?" if near else "")
        known = ", ".join(map(str, meta["choices"]))
        raise SettingsError(f"{f.name} must be one of {known}; got {value!r}. {hint}".rstrip())
    if meta["low"] is not None and not value >= meta["low"]:  # written so that NaN is refused as well
        raise SettingsError(f"{f.name} must be at least {meta['low']}, got {value}.")
    if meta["high"] is not None and value > meta["high"]:
        raise SettingsError(f"{f.name} must be at most {meta['high']}, got {value}.")
    return value


def unknown_setting_text(name: str, known: list[str]) -> str:
    near = nearest(OURS.get(name, name), known)
    hint = f" Did you mean {near!r}?" if near else " `bough generate --help` lists them all."
    return f"There is no setting {name!r}.{hint}"


def json_object(text: str, flag: str) -> dict[str, Any]:
    """What a flag says in a JSON object."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--{flag} must be a JSON object, but is not valid JSON: {error}.") from None
    if not isinstance(given, dict):
        raise SettingsError(f"--{flag} must be a JSON object.")
    return given


def by_kind(text: str, flag: str, value: type) -> dict[str, Any]:
    """What a flag says of each kind of media, as JSON."""
    with contextlib.suppress(ValueError, AttributeError):
        given = json.loads(text)
        if given.keys() <= {"image", "video", "audio"} and all(type(each) is value for each in given.values()):
            if value is int and min(given.values(), default=0) < 0:
                raise SettingsError(f"--{flag} has counts of 0 or more, got {text!r}.")
            return dict(given)
    raise SettingsError(f'--{flag} must be a JSON object with "image", "video" or "audio" as names, got {text!r}.')


def add_flags(
    section: argparse._ActionsContainer, flags: Mapping[str, Any], more: Mapping[str, Mapping[str, Any]]
) -> None:
    """Flags by name, of each what `add_argument` takes, with `more` that a table cannot say."""
    for name, said in flags.items():
        own = {**said, **more.get(name.replace("-", "_"), {})}
        section.add_argument(f"--{name}", **own | ({"type": NUMBERS[said["type"]]} if "type" in said else {}))


def add_table(parser: argparse.ArgumentParser, groups: Mapping[str, Any], **more: Mapping[str, Any]) -> None:
    """The same by groups."""
    for title, flags in groups.items():
        add_flags(parser.add_argument_group(title), flags, more)


def require_counts(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Each, or each of a list, is at least 1; None is skipped."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise SettingsError(f"{flag_of(name)} must be at least 1, got {value}.")


def require_above_zero(args: argparse.Namespace, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(args, name)
        if not value > 0:
            raise SettingsError(f"{flag_of(name)} must be above 0, got {value:g}.")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
