"""The frontend language: programs that write with a model, in this process, against a server or another vendor's API.

`primitives` is what programs are made of, `program` how they are run, `state` what they hold, `interpreter` what
happens then, `backends` where. Names are SGLang's: its programs run after `import bough as sgl`.
"""

from __future__ import annotations

from bough.lang.backends.anthropic import Anthropic
from bough.lang.backends.endpoint import RuntimeEndpoint
from bough.lang.backends.openai import Crusoe, LiteLLM, OpenAI, VertexAI
from bough.lang.choices import greedy_token_selection, token_length_normalized, unconditional_likelihood_normalized
from bough.lang.config import flush_cache, get_server_info, global_config, set_default_backend
from bough.lang.primitives import (
    REGEX_BOOL,
    REGEX_FLOAT,
    REGEX_INT,
    REGEX_STR,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_float,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from bough.lang.program import function
from bough.lang.runtime import Runtime
from bough.lang.state import ProgramState

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "Anthropic",
    "Crusoe",
    "LiteLLM",
    "OpenAI",
    "ProgramState",
    "Runtime",
    "RuntimeEndpoint",
    "VertexAI",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_float",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
