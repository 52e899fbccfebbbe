"""A forward context for layers that do not look into it."""

from __future__ import annotations

from typing import cast

from bough.attention.context import ForwardContext

NO_CONTEXT = cast(ForwardContext, None)
