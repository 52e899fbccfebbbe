"""Sampling parameters as flags, derived from `SamplingParams`: types and defaults are read there, the help in a table.

What is not given is left out, so that the values that a model's makers recommend can take effect.
"""

import argparse
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

from bough.cli.flags import add_flag, from_text
from bough.core.errors import RequestError, SettingsError
from bough.core.files import table_beside
from bough.core.sampling_params import SamplingParams
from bough.core.setting_checks import TYPE_WORDS

HELP: dict[str, str] = table_beside(__file__, "sampling_flags.toml")
ALIASES = {"sampling_seed": ["seed"]}
METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_sampling_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None, leave_out: frozenset[str] = frozenset()
) -> None:
    """Adds a flag for every parameter that makes sense on a command line. `defaults` are the command's own."""
    section = parser.add_argument_group("Sampling", "Where the model's makers recommend a value, that is the default.")
    usual = SamplingParams.parse(defaults)
    for name, text in HELP.items():
        if name in leave_out:
            continue
        plain, many = _kind(name)
        default = getattr(usual, name)
        options: dict[str, Any]
        if plain is bool:
            options = {"action": "store_true"}
        else:
            options = {"action": "append" if many else "store", "metavar": METAVARS[plain]}
            options["type"] = functools.partial(_converted, name, plain)
            text += "" if many or default is None else f" (default: {default})"
        add_flag(section, name, ALIASES.get(name, []), help=text, **options)


def given_sampling(parsed: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The parameters that the user gave, over the command's own, checked before an engine is started for them."""
    values = {**(defaults or {}), **{name: value for name, value in vars(parsed).items() if name in HELP}}
    try:
        SamplingParams.parse(values)
    except RequestError as error:
        raise SettingsError(str(error)) from None
    return values


def _kind(name: str) -> tuple[type, bool]:
    hint = typing.get_type_hints(SamplingParams)[name]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None)), False
    return hint, False


def _converted(name: str, plain: type, given: str) -> Any:
    value = from_text(plain, given)
    if not isinstance(value, plain):
        raise SettingsError(f"{name} must be {TYPE_WORDS[plain]}, got {given!r}.")
    return value
