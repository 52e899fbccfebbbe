"""The frontend language: programs that write with a model, in this process, against a server or another vendor's API.

`primitives` is what programs are made of, `program` how they are run, `state` what they hold, `interpreter` what
happens then, `backends` where. Names are SGLang's: its programs run after `import bough as sgl`, which passes on
what is imported here as itself.
"""

from bough.lang.backends.anthropic import Anthropic as Anthropic
from bough.lang.backends.endpoint import RuntimeEndpoint as RuntimeEndpoint
from bough.lang.backends.openai import Crusoe as Crusoe
from bough.lang.backends.openai import LiteLLM as LiteLLM
from bough.lang.backends.openai import OpenAI as OpenAI
from bough.lang.backends.openai import VertexAI as VertexAI
from bough.lang.choices import greedy_token_selection as greedy_token_selection
from bough.lang.choices import token_length_normalized as token_length_normalized
from bough.lang.choices import unconditional_likelihood_normalized as unconditional_likelihood_normalized
from bough.lang.config import flush_cache as flush_cache
from bough.lang.config import get_server_info as get_server_info
from bough.lang.config import global_config as global_config
from bough.lang.config import set_default_backend as set_default_backend
from bough.lang.primitives import REGEX_BOOL as REGEX_BOOL
from bough.lang.primitives import REGEX_FLOAT as REGEX_FLOAT
from bough.lang.primitives import REGEX_INT as REGEX_INT
from bough.lang.primitives import REGEX_STR as REGEX_STR
from bough.lang.primitives import assistant as assistant
from bough.lang.primitives import assistant_begin as assistant_begin
from bough.lang.primitives import assistant_end as assistant_end
from bough.lang.primitives import gen as gen
from bough.lang.primitives import gen_float as gen_float
from bough.lang.primitives import gen_int as gen_int
from bough.lang.primitives import gen_string as gen_string
from bough.lang.primitives import image as image
from bough.lang.primitives import select as select
from bough.lang.primitives import separate_reasoning as separate_reasoning
from bough.lang.primitives import system as system
from bough.lang.primitives import system_begin as system_begin
from bough.lang.primitives import system_end as system_end
from bough.lang.primitives import user as user
from bough.lang.primitives import user_begin as user_begin
from bough.lang.primitives import user_end as user_end
from bough.lang.primitives import video as video
from bough.lang.program import function as function
from bough.lang.runtime import Runtime as Runtime
from bough.lang.state import ProgramState as ProgramState
