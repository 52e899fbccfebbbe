"""Refuses numbers that a benchmark cannot use, by their flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from bough.core.errors import SettingsError


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
