"""Roles through chat templates: what is written grows only, and ends up as the template would have rendered it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.core.errors import RequestError, SettingsError
from bough.lang.chat import (
    FORMATS,
    ChatFormat,
    Document,
    NoChat,
    TemplateFormat,
    format_by_name,
    format_by_path,
    place_of,
)
from bough.tokenizer.chat_template import ChatTemplate

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% if not rest %}{{ raise_exception('no user message') }}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and sys is defined %}<<SYS>>\n{{ sys }}\n<</SYS>>\n\n{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


def written(chat_format: ChatFormat, messages: Sequence[tuple[str, str]]) -> str:
    document = Document(chat_format)
    for role, content in messages:
        before = document.text
        document.begin(role, generated=False)
        document.text += content
        document.end(role)
        assert document.text.startswith(before)
    return document.text


def rendered(source: str, messages: Sequence[tuple[str, str]]) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render([{"role": r, "content": c} for r, c in messages], add_generation_prompt=False)


contents = st.text("ab \n{", max_size=4)


@given(st.booleans(), st.lists(contents, min_size=1, max_size=5))
def test_chatml_is_written_as_it_is_rendered(with_system: bool, texts: list[str]) -> None:
    roles = (["system"] if with_system else []) + ["user", "assistant"] * 3
    messages = list(zip(roles, texts, strict=False))
    assert written(TemplateFormat(ChatTemplate(CHATML)), messages) == rendered(CHATML, messages)


def test_a_template_that_puts_the_system_message_into_the_users() -> None:
    chat_format = TemplateFormat(ChatTemplate(LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}))
    messages = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    assert written(chat_format, messages) == rendered(LLAMA2, messages)
    assert written(chat_format, messages[1:]) == rendered(LLAMA2, messages[1:])


def test_the_tokenizers_first_token_is_not_written_twice() -> None:
    chat_format = TemplateFormat(ChatTemplate(LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}), "<s>")
    assert written(chat_format, [("user", "Hi")]) == "[INST] Hi [/INST]"
    assert written(chat_format, [("user", "Hi"), ("assistant", "a"), ("user", "b")]).count("<s>") == 1


def test_the_generation_prompt_stands_only_where_the_model_writes() -> None:
    document = Document(TemplateFormat(ChatTemplate(THINKING)))
    for role, generated in (("user", False), ("assistant", False), ("user", True), ("assistant", True)):
        document.begin(role, generated=generated)
        document.text += "a</think>b"
        document.end(role)
    assert (
        document.text == "<user>a</think>b</>"
        "<assistant>a</think>b</>"
        "<user>a</think>b</><assistant><think>\n"
        "a</think>b</>"
    )


def test_what_a_template_refuses_is_told() -> None:
    picky = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}"
    document = Document(TemplateFormat(ChatTemplate(picky)))
    document.begin("user", generated=False)
    document.end("user")
    with pytest.raises(RequestError, match="one only"):
        document.begin("user", generated=False)
    with pytest.raises(RequestError, match="drops a message"):
        Document(TemplateFormat(ChatTemplate("constant"))).begin("user", generated=False)
    with pytest.raises(RequestError, match="no chat template"):
        Document(NoChat()).begin("user", generated=False)
    with pytest.raises(RequestError, match="cannot end here"):
        Document(FORMATS["default"]).end("user")


def test_formats_by_name_and_by_path() -> None:
    assert written(format_by_name("default"), [("user", "Hi"), ("assistant", "Yes")]) == "USER:Hi\nASSISTANT:Yes\n"
    assert format_by_path("meta-llama/Llama-3.1-8B-Instruct") is FORMATS["llama-3-instruct"]
    assert format_by_path("Qwen/Qwen3-0.6B") is FORMATS["qwen"] and format_by_path("gpt2") is FORMATS["default"]
    assert written(FORMATS["chatml"], [("user", "a")]).startswith("<|im_start|>system\nYou are")
    with pytest.raises(SettingsError, match="Did you mean 'chatml'"):
        format_by_name("chatlm")


def test_pictures_are_parts_of_their_message() -> None:
    document = Document(FORMATS["default"])
    document.begin("user", generated=False)
    document.text += "Look: "
    document.add_media({"type": "image", "image": "cat.png"}, placed=True)
    document.text += " what?"
    film = {"type": "video", "video": "film.mp4", "num_frames": 4}
    document.add_media(film, placed=True)
    document.end("user")
    assert document.messages[0]["content"] == [
        {"type": "text", "text": "Look: "},
        {"type": "image", "image": "cat.png"},
        {"type": "text", "text": " what?"},
        film,
    ]
    assert document.text == "USER:Look: <image> what?<video>\n"


def test_pictures_have_the_models_own_place() -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text or '[IMG]' }}{% endfor %}|{% endfor %}"
    document = Document(TemplateFormat(ChatTemplate(template, placeholders={"video": "[VID]"})))
    document.begin("user", generated=False)
    document.add_media({"type": "image", "image": "cat.png"}, placed=True)
    document.text += "what?"
    document.end("user")
    assert document.text == "[IMG]what?|"
    plain = TemplateFormat(ChatTemplate("{{ messages[0].content }}", placeholders={"video": "[VID]"}))
    assert (place_of(plain, "video"), place_of(plain, "image")) == ("[VID]", "<image>")
