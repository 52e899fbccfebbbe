"""Configuration files: YAML with a mapping at its top, and one sentence for whatever is wrong with it."""

from typing import Any

from bough.core.errors import SettingsError
from bough.core.files import user_path


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
