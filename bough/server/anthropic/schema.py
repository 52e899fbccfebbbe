"""What Anthropic's clients may send. `None` is "not given" throughout, as a JSON `null` is.

Fields that only concern somebody else's billing, caching or tracing (`metadata`, `cache_control`, `service_tier`, ...)
are taken and change nothing; those whose feature this engine lacks are `reading`'s to refuse.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from bough.core.sampling_params import INT32_MAX
from bough.server.bodies import above, between
from bough.server.streaming import Resume

Messages = Annotated[
    list[dict[str, Any]],
    msgspec.Meta(
        description="The conversation. A content is a string or a list of text blocks.",
        examples=[[{"role": "user", "content": "Hello"}]],
    ),
]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    messages: Messages
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, between(0, INT32_MAX)]
    temperature: Annotated[float | None, between(0, 1)] = None
    top_p: Annotated[float | None, above(0, 1)] = None
    top_k: Annotated[int | None, between(0, INT32_MAX)] = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    container: str | dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    return_timings: bool | None = None
    resume: Resume | None = None
