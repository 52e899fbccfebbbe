"""What Bough uses of the `gguf` package, imported without the converters' dependency.

Where mistral_common is installed, `gguf` imports it for its converters. That takes three times as long as `gguf`
itself, in each process of an engine, so it looks absent meanwhile.
"""

import sys

_hides = "mistral_common" not in sys.modules
if _hides:
    sys.modules["mistral_common"] = None  # type: ignore[assignment]  # the import system's mark of an absent module
try:
    from gguf import quants
    from gguf.constants import (
        GGML_QUANT_SIZES,
        GGUF_DEFAULT_ALIGNMENT,
        GGUF_MAGIC,
        GGMLQuantizationType,
        GGUFValueType,
        LlamaFileType,
    )
    from gguf.gguf_reader import GGUFReader
finally:
    if _hides:
        del sys.modules["mistral_common"]

__all__ = [
    "GGML_QUANT_SIZES", "GGUF_DEFAULT_ALIGNMENT", "GGUF_MAGIC", "GGMLQuantizationType", "GGUFReader", "GGUFValueType",
    "LlamaFileType", "quants",
]  # fmt: skip
