"""The frontend language: programs that write with a model, in this process, against a server or another vendor's API.

`primitives` is what programs are made of, `program` how they are run, `state` what they hold, `interpreter` what
happens then, `backends` where. Names are SGLang's: its programs run after `import bough as sgl`, which passes on
what stands in `__all__`.
"""
# ruff: noqa: F403  # `primitives` lists its names itself

from bough.lang import primitives
from bough.lang.backends.anthropic import Anthropic
from bough.lang.backends.endpoint import RuntimeEndpoint
from bough.lang.backends.openai import Crusoe, LiteLLM, OpenAI, VertexAI
from bough.lang.choices import greedy_token_selection, token_length_normalized, unconditional_likelihood_normalized
from bough.lang.config import flush_cache, get_server_info, global_config, set_default_backend
from bough.lang.primitives import *
from bough.lang.program import function
from bough.lang.runtime import Runtime
from bough.lang.state import ProgramState

__all__ = [
    "Anthropic", "Crusoe", "LiteLLM", "OpenAI", "ProgramState", "Runtime", "RuntimeEndpoint", "VertexAI",
    "flush_cache", "function", "get_server_info", "global_config", "greedy_token_selection", "set_default_backend",
    "token_length_normalized", "unconditional_likelihood_normalized",
]  # fmt: skip
__all__ += primitives.__all__
