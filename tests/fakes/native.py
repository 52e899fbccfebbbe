"""Cases for the CPU kernels, which are skipped where nobody could compile them."""

import pytest

from bough.native.library import load_library

needs_kernels = pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not compiled")
NATIVE = pytest.param("native", marks=needs_kernels)
