"""What can be known to be wrong with a model before any of it is loaded. Torch-free, and takes milliseconds.

The scheduler process finds all of this too, but only after seconds, when the caller's process may have stumbled over
something less important, such as a missing tokenizer.
"""

from __future__ import annotations

import json

from bough.core.errors import ModelError, SettingsError
from bough.core.settings import ModelSettings
from bough.loader.config import read_config
from bough.loader.locate import ModelFiles


def check_model(files: ModelFiles, settings: ModelSettings) -> None:
    """Raises if the configuration cannot be used, the architecture is unknown, or a file of weights is damaged."""
    try:
        overrides = json.loads(settings.json_model_override_args)
    except ValueError as error:
        raise SettingsError(f"--json-model-override-args is not valid JSON: {error}.") from None
    if not isinstance(overrides, dict):
        raise SettingsError("--json-model-override-args must be a JSON object.")
    read_config(files, overrides)
    if settings.load_format in ("auto", "safetensors"):
        _check_headers(files)


def _check_headers(files: ModelFiles) -> None:
    """Each file's list of tensors must be readable and agree with the file's length."""
    from safetensors import SafetensorError, safe_open

    for path in files.safetensors:
        try:
            with safe_open(str(path), framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again.") from None
