"""Back ends of SGLang's that are not made here: what a program that asks for one is told to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from bough.core.errors import SettingsError


def VertexAI(model_name: str = "MODEL", *args: Any, **kwargs: Any) -> NoReturn:  # SGLang's name
    """Google's API is reached through LiteLLM."""
    raise SettingsError(
        f"There is no back end of its own for Vertex AI; use LiteLLM('vertex_ai/{model_name}') "
        "(pip install 'bough[litellm]')."
    )


def Crusoe(model_name: str = "MODEL", *args: Any, **kwargs: Any) -> NoReturn:  # SGLang's name
    """Crusoe's API speaks OpenAI's language."""
    raise SettingsError(
        f"There is no back end of its own for Crusoe; use OpenAI('{model_name}', base_url=…, api_key=…) with the "
        "address of its API (pip install 'bough[openai]')."
    )
