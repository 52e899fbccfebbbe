"""Prompts as Mistral's own library writes them, where a `tekken.json` has no chat template beside it. The library is
the extra `mistral`."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from bough.core.errors import RequestError
from bough.tokenizer.chat_template import ChatTemplate


class MistralTemplate(ChatTemplate):
    """Has no source that somebody else could render."""

    def __init__(self, tekken: Path) -> None:
        super().__init__({})
        self._tekken = tekken

    @cached_property
    def _library(self) -> Any:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        return MistralTokenizer.from_file(self._tekken)  # seconds, and not every process renders prompts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """An answer is to follow in any case: the format has no mark for that."""
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        fitted = [self._fitted(message) for message in messages]  # which refuses media
        try:
            request = ChatCompletionRequest.from_openai(
                fitted, None if tools is None else list(tools), continue_final_message=continue_final_message, **extra
            )
            ids = self._library.encode_chat_completion(request).tokens
        except (MistralCommonException, TypeError, ValueError, AttributeError, LookupError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(f"mistral-common refused the messages: {reason}", field="messages") from None
        text: str = self._library.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)
        return text
