"""Chat templates: what they render, how they fail, and that they agree with `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from bough.core.errors import RequestError
from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße 😀"},
    {"role": "assistant", "content": " So it "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>ä</b>", "parameters": {"type": "object"}}}]
TRIMMING = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "trimming": TRIMMING,
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n  {{ m.content }}\n  {% endif %}\n{% endfor %}",
    "tools": "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}.",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "macro": "{% macro say(m) %}{{ m.role }}{{ m.content }}{% endmacro %}{{ say(messages[0]) }}{{ say(messages[1]) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "extra": "{{ enable_thinking is defined and not enable_thinking }}{{ documents is none }}{{ missing }}",
    "date": "{{ strftime_now('%Y') }}",
}


def reference(template: str, messages: list[dict[str, str]], **kwargs: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=template, bos_token="<s>", **kwargs)
    return str(rendered[0])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("generate", [True, False])
def test_renders_as_transformers_does(template: str, tools: list[dict[str, Any]] | None, generate: bool) -> None:
    ours = ChatTemplate(template, {"bos_token": "<s>"}).render(
        TALK, add_generation_prompt=generate, tools=tools, extra={"enable_thinking": False}
    )
    theirs = reference(template, TALK, add_generation_prompt=generate, tools=tools, enable_thinking=False)
    assert ours == theirs


def test_smollm2_renders_its_own_template(smollm2: Tokenizer) -> None:
    assert smollm2.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.apply_chat_template(TALK[:2], add_generation_prompt=False) == (
        "<|im_start|>system\nBe <brief> & kind.<|im_end|>\n<|im_start|>user\nGrüße 😀<|im_end|>\n"
    )


@pytest.mark.parametrize("template", [TEMPLATES["plain"], TRIMMING], ids=["plain", "trimming"])
@pytest.mark.parametrize("content", [" So it ", "So", ""])
def test_the_last_message_is_continued_as_transformers_does(template: str, content: str) -> None:
    talk = [*TALK[:2], {"role": "assistant", "content": content}]
    ours = ChatTemplate(template).render(talk, add_generation_prompt=False, continue_final_message=True)
    assert ours == reference(template, talk, continue_final_message=True)
    assert talk[-1]["content"] == content  # the caller's messages stay as they were


def test_the_last_text_part_is_continued() -> None:
    template = "{% for p in messages[-1].content %}<{{ p.text }}>{% endfor %}"
    talk = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    rendered = ChatTemplate(template).render(talk, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "<a><b"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", TALK, "refused the messages: roles must alternate"),
        ("{% if %}", TALK, "refused the messages: "),
        ("{{ messages[0].nothing.deeper }}", TALK, "refused the messages: .*nothing"),
        ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": [1]}], "cannot render.*TypeError"),
        ("{{ 1 / 0 }}", TALK, "cannot render.*ZeroDivisionError"),
        ("{{ messages.append(1) }}", TALK, "refused the messages: .*append"),
        ("{{ ''.__class__.__mro__ }}", TALK, "refused the messages: .*unsafe"),
    ],
)
def test_a_failing_template_is_the_requests_error(template: str, messages: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        ChatTemplate(template).render(messages)
    assert caught.value.status_code == 400
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "messages", "generate", "reason"),
    [
        ("{{ messages }}", TALK, True, "set only one of them"),
        ("nothing", TALK, False, "drops the last message"),
        ("nothing", [], False, "needs a last message"),
        ("nothing", [{"role": "assistant", "content": None}], False, "needs a last message"),
    ],
)
def test_what_cannot_be_continued(template: str, messages: Any, generate: bool, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        ChatTemplate(template).render(messages, add_generation_prompt=generate, continue_final_message=True)


def test_named_templates_are_chosen_by_tools() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert both.render(TALK) == "plain"
    assert both.render(TALK, tools=TOOLS) == "tools"
    with pytest.raises(RequestError, match="only rag"):
        ChatTemplate({"rag": "x"}).render(TALK)


def test_the_client_cannot_replace_the_conversation(smollm2: Tokenizer) -> None:
    assert "Hi" in smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], messages=[])
