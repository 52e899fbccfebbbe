"""The engine's settings as flags, `BOUGH_*` variables and configuration files: all derived from `bough.core.settings`.

Flags win over variables, those over the file of `--config`. Values are converted from text here and judged by the
setting's own check. What the user did not give is absent: defaults stand in the settings alone.
"""

import argparse
import dataclasses
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from bough.cli.commands import did_you_mean
from bough.core.errors import SettingsError
from bough.core.files import read_yaml
from bough.core.setting_checks import check_value, field_type, help_of
from bough.core.settings import ALIASES, Settings, all_fields

log = logging.getLogger(__name__)

Field = dataclasses.Field[Any]

ENVIRONMENT_PREFIX = "BOUGH_"
# No settings: where fetched models and stored pages lie, and a secret that no flag shall show to `ps`.
GATEWAY_PREFIX = "BOUGH_GATEWAY_"  # of a gateway's own settings, whose engines have its environment
OTHER_VARIABLES = frozenset({"BOUGH_HOME", "BOUGH_HICACHE_FILE_BACKEND_STORAGE_DIR", "BOUGH_CLUSTER_KEY"})
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})


# ---- flags


def add_engine_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None, *, server: bool = False
) -> None:
    """Adds a flag for every setting of an engine, group by group, those of the server where there is one, and
    `--config`. `defaults` are shown in place of the settings' own by commands that have others; they do not become
    values."""
    defaults = defaults or {}
    for group, fields in itertools.groupby(all_fields(), key=lambda pair: pair[0]):
        if group == "server" and not server:
            continue
        section: argparse._ActionsContainer = parser
        if group != "unbuilt":
            section = parser.add_argument_group(group.capitalize(), getattr(Settings(), group).__doc__)
        for _, f in fields:
            add_setting(section, f, defaults.get(f.name, f.default))
    section = parser.add_argument_group("Configuration", "Flags override BOUGH_* variables, which override the file.")
    section.add_argument("--config", metavar="FILE", help="YAML file with settings, by their names without the dashes")


def add_setting(section: argparse._ActionsContainer, f: Field, default: Any) -> None:
    aliases = [alias for alias, target in ALIASES.items() if target == f.name]
    options: dict[str, Any] = {}
    if field_type(f)[0] is not bool:
        options |= {"metavar": _metavar(f)} | ({"nargs": "+"} if f.metadata["many"] else {})
    elif f.default:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["action"] = "store_true"
    add_flag(section, f.name, aliases, help=help_of(f) + _shown(default), **options)


def add_flag(
    section: argparse._ActionsContainer, name: str, aliases: Sequence[str], *, help: str, **options: Any
) -> None:
    """A flag that leaves no trace when it is not given."""
    names = ["--" + spelling.replace("_", "-") for spelling in (name, *aliases)]
    options |= {"dest": name, "default": argparse.SUPPRESS}
    section.add_argument(*names, help=help.replace("%", "%%"), **options)
    if "_" in name:  # the spelling of the Python keyword works as well, without a line of its own
        section.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)


def _metavar(f: Field) -> str:
    if f.metadata["choices"] is not None:
        return "{" + ",".join(map(str, f.metadata["choices"])) + "}"
    if f.name == "model_path":
        return "MODEL"
    if f.name.endswith("_path"):
        return "PATH"
    if f.name.endswith("_s"):
        return "SECONDS"
    return {int: "N", float: "X", str: "TEXT"}[field_type(f)[0]]


def _shown(default: Any) -> str:
    if default is None or default is False:
        return ""
    return f" (default: {'on' if default is True else default})"


# ---- values


def settings_with_model(parsed: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Settings:
    """Of commands that take the model as an argument, too."""
    given = given_settings(parsed, environ)
    if parsed.model is not None:
        if vars(parsed).get("model_path", parsed.model) != parsed.model:
            raise SettingsError("The model was given twice: as an argument and with --model-path; give it once.")
        given["model_path"] = parsed.model
    return Settings.from_flat(given)


def given_settings(parsed: argparse.Namespace, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    given = vars(parsed)
    return {
        **_from_file(parsed.config),
        **_from_environment(os.environ if environ is None else environ),
        **{f.name: checked(f, given[f.name]) for _, f in all_fields() if f.name in given},
    }


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """`BOUGH_PAGE_SIZE=16` and the like; an empty variable counts as unset."""
    found: dict[str, Any] = {}
    spellings = [(f.name, f) for _, f in all_fields()]
    spellings += [(alias, f) for alias, target in ALIASES.items() for name, f in spellings if name == target]
    for name, f in spellings:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environ.get(variable):
            found.setdefault(f.name, checked(f, environ[variable], f"{variable}: "))
    # A misspelt variable is no error, because it may be meant for another version; but it should not go unnoticed.
    known = OTHER_VARIABLES | {ENVIRONMENT_PREFIX + name.upper() for name, _ in spellings}
    for variable in sorted(environ):
        ours = variable.startswith(ENVIRONMENT_PREFIX) and not variable.startswith(GATEWAY_PREFIX)
        if ours and variable not in known:
            log.warning("The variable %s is no setting and has no effect.%s", variable, did_you_mean(variable, known))
    return found


def _from_file(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    known = {f.name: f for _, f in all_fields()}
    found: dict[str, Any] = {}
    for key, value in read_yaml(file).items():
        name = str(key).replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in known:
            raise SettingsError(f"{file}: there is no setting {key!r}.{did_you_mean(name, [*known, *ALIASES])}")
        if name in found:
            raise SettingsError(f"{file}: {name} is given twice; keep one of them.")
        if value is not None:
            found[name] = checked(known[name], value, f"{file}: ")
    return found


def checked(f: Field, value: Any, origin: str = "") -> Any:
    """The value in the setting's own type; an error begins with where the value came from."""
    if isinstance(value, str):
        value = from_text(field_type(f)[0], value)
    try:
        return check_value(f, value)
    except SettingsError as error:
        raise SettingsError(f"{origin}{error}") from None


def from_text(plain: type, text: str) -> Any:
    """The text as a value of that type; left as it is where it cannot be one, for the check to complain about."""
    if plain is bool:
        word = text.casefold()
        return word in TRUE_WORDS if word in TRUE_WORDS | FALSE_WORDS else text
    if plain in (int, float):
        try:
            return plain(text)
        except ValueError:
            return text
    return text
