"""Loop bounds that a kernel has loaded, in Triton's interpreter.

The interpreter of triton 3.6 makes an int of a one-element array, which numpy 2.4 refuses. Importing this module gives
it the conversion that both know. On a GPU nothing is interpreted and nothing changes.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: type[tl.tensor], scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index
