"""Chat templates: what they render, how they fail, and that they agree with `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from bough.core.errors import RequestError, SettingsError
from bough.tokenizer import chat_template
from bough.tokenizer.chat_template import ChatTemplate, given_template
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
        TALK, add_generation_prompt=generate, tools=tools, enable_thinking=False
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


LONG = "{% for i in range(99999) %}"
NESTING = "{% set ns = namespace(l={'a': 1}) %}{% for i in range(60) %}{% set ns.l = "
GROWING = "{% set ns = namespace(s='ab', l=[1, 2], n=3) %}{% for i in range(99) %}"


@pytest.mark.parametrize(
    "template",
    [
        LONG * 4 + "{% endfor %}" * 4,
        LONG * 4 + "{{ loop.length }}" + "{% endfor %}" * 4,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for i in [1, 2] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        LONG * 4 + "{{ range(999) | sort | length }}" + "{% endfor %}" * 4,
        "{{ ([[1] * 999] * 99999) | sum(start=[]) | length }}",
    ],
)
def test_a_template_without_an_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.05)
    with pytest.raises(RequestError, match="does not come to an end; give another with --chat-template"):
        ChatTemplate(template).render(TALK)
    assert ChatTemplate("{{ messages | length }}").render(TALK) == str(len(TALK)), "the next one has its own time"


def test_formats_of_a_usual_width_are_filled() -> None:
    template = "{{ '**%s** 5%% 01234567 %5.2f' % ('a', 1) }} {{ '{:*>5} 01234567'.format(1) }} {{ '%s' | format(2) }}"
    assert ChatTemplate(template).render(TALK) == "**a** 5% 01234567  1.00 ****1 01234567 2"


@pytest.mark.parametrize(
    "template",
    [
        GROWING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        GROWING + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        GROWING + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
        GROWING + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}" + GROWING + "{% set ns.s = m(ns.s) %}{% endfor %}",
        GROWING + "{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}{% endfor %}",
        "{% macro m(s) %}{{ m(s + s) }}{% endmacro %}{{ m('ab') }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 7 * [0] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a'.center(3000000000) }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '%*d' % (3000000000, 1) }}",
        "{{ '%3000000000d' | format(1) }}",
        "{{ '{:>3000000000}'.format(1) }}",
        "{{ 'a' | indent(3000000000, true) }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ [1] | slice(1000000000) | list | length }}",
        "{{ ('\t' * 99999).expandtabs(99999) }}",
        "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
        "{{ '%((a)b)3000000000d' % {'(a)b': 1} }}",
        "{{ '%3000000000d'.encode() % 1 }}",
        "{{ '{:{w}}'.format(1, w=3000000000) }}",
        "{{ '{:300{w}}'.format(1, w=0000000) }}",
        "{{ ('%(a)999d' * 99999) % {'a': 1} }}",
        "{{ ('%(a)s' * 9999) % {'a': 'b' * 99999} }}",
        "{{ ('{a}' * 9999).format(a='b' * 99999) }}",
        "{% set s = '%(' * 400000 %}{{ s % 1 }}",
        "{{ ('{{' * 800000).format(1) }}",
        NESTING + "[ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
        NESTING + "(ns.l, ns.l) %}{% endfor %}{{ {ns.l: 1} }}",
        NESTING + "{'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}",
        NESTING + "{'a': ns.l.items(), 'b': ns.l.items()} %}{% endfor %}{{ ns.l }}",
        "".join(f"{{% with a{i + 1} = [a{i}, a{i}] %}}" for i in range(50)) + "{{ a50 }}" + "{% endwith %}" * 50,
        "{% macro m(l) %}{{ m([l, l]) }}{% endmacro %}{{ m([1]) }}",
        "{{ (['a' * 99999] * 9999) | join }}",
        "{{ [{'x': 'a' * 99999}] * 9999 }}",
        "{{ (range(99999) | map('string') | join('a' * 99999)) | length }}",
        "{% for x in [1] | batch(9999, 'a' * 99999) %}{{ x }}{% endfor %}",
        "{% for i in range(2700) %}{{ 'a' * 99999 }}{% endfor %}",
        "{% set s = 'a' * 999999 %}{{ (" + "s ~ " * 99 + "s) | length }}",
        "{% set s = 'a' * 999999 %}{{ (" + "s + " * 99 + "s) | length }}",
        "{{ ('a' * 9999).translate({97: 'b' * 99999}) }}",
        "{{ (1).from_bytes(('a' * 199999).encode(), 'big') % 7 }}",
        "{{ [1] | tojson(indent=100000) }}",
        "{{ ('ab' * 400000) | wordwrap(1) }}",
        NESTING + "{'a': ns.l.keys().mapping, 'b': ns.l.keys().mapping} %}{% endfor %}{{ ns.l }}",
        NESTING + "[ns.l] + [ns.l] %}{% endfor %}{{ ns.l }}",
        "{% set m = ('a' * 99999) | safe %}{{ [m.join] * 9999 }}",
        "{{ strftime_now('%999999999d' ~ ' ' * 9999999) | length }}",
        "{% macro m(s) %}{{ m(s + 'b') }}{% endmacro %}{{ m('a' * 99999999) }}",
        "".join(f"{{% set a{i} = 'a' * 99999999 %}}" for i in range(5)),
        "{{ ('é' * 999999) | urlencode | length }}",
        "{{ ('ab' * 9999999) | batch(2) | list | length }}",
    ],
)
def test_a_template_does_not_fill_the_memory(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_TEXT", 1 << 20)
    with pytest.raises(
        RequestError, match=r"^The chat template makes too much text; give another with --chat-template"
    ):
        ChatTemplate(template).render(TALK)


def test_what_only_looks_large_is_written() -> None:
    template = (
        '{{ \'{"a": {"b": "%s"}} (1) 20261119 100%%\' % 1 }} {{ \'{{"a": {{"b": {0}}}}}\'.format(2) }} '
        "{% for i in range(3) %}{{ i % 2 }}{% endfor %} {{ '%(a)s %(a)5s' % {'a': 'b'} }} "
        "{{ messages | map(attribute='content') | join('\n\n' * 99) | length }} {{ 'a' ~ 1 ~ none ~ [1] ~ nothing }} "
        "{{ [[1, 2], {'a': none}, 1.5, true] }} {{ {'a': [1]}.items() | list | tojson(indent=1) | length }} {{ 9 + 1 }}"
    )
    expected = '{"a": {"b": "1"}} (1) 20261119 100% {"a": {"b": 2}} 010 b     b '
    said = [{"role": "user", "content": "x" * 99999}] * 3
    assert ChatTemplate(template).render(said) == (
        expected + f"{3 * 99999 + 4 * 99} a1None[1] [[1, 2], {{'a': None}}, 1.5, True] 29 10"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in [1] %}" * 22 + "{% endfor %}" * 22,
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{% break %}",
        "{{ dict(a=1, a=2) }}",
        "{% macro a(b, b) %}{% endmacro %}",
        "{{ 1" + "0" * 5000 + " }}",
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    ],
)
def test_a_template_that_python_cannot_compile_is_refused(template: str) -> None:
    with pytest.raises(RequestError, match="The chat template cannot render these messages: "):
        ChatTemplate(template).render(TALK)
    with pytest.raises(SettingsError, match=r"^--chat-template cannot be compiled: "):
        given_template("{{ 1 }}" + template)


def test_messages_that_are_gathered_one_by_one_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}"
    template = ChatTemplate(gathered + "{{ ns.l == messages }}{{ kept() }}")
    said = [{"role": "user", "content": "x" * 999}] * 999
    kept = {"kept": lambda: f" {chat_template._clock.held < 3 << 22}"}
    assert template.render(said, **kept) == "True False"
    monkeypatch.setattr(chat_template, "MOST_TEXT", 1 << 22)
    assert template.render(said, **kept) == "True True"


def test_lists_of_a_conversation_are_joined() -> None:
    template = "{% set l = messages | map(attribute='calls') | sum(start=[]) %}{{ l }}{{ [1, 2] | sum }}"
    assert ChatTemplate(template).render([{"calls": [1]}, {"calls": [2, 3]}]) == "[1, 2, 3]3"


def test_nothing_of_a_conversation_is_kept_for_the_next() -> None:
    ChatTemplate("{% set all = messages %}").render(TALK)
    assert not chat_template._clock.__dict__


def test_large_numbers_and_long_texts_are_values_like_others() -> None:
    template = ChatTemplate(
        "{% macro show(a, b) %}{{ a | string }}{{ b | length }}{% endmacro %}{% set at = messages[0].at %}"
        "{% set c = messages[0].content %}{{ show(at, c) }} {{ at | tojson }} {{ at | default(at) }} "
        "{{ at | int(at) }} {{ [at] | select('equalto', at) | list }} {{ show(c, c) | length }} {{ c.startswith(c) }} "
        "{{ c.split(c) }}"
    )
    said = template.render([{"role": "user", "content": "ab" * 50_000, "at": 1_763_510_400}])
    one = "1763510400"
    assert said == f"{one}100000 {one} {one} {one} [{one}] 100006 True ['', '']"


def test_a_long_conversation_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.0)
    template = ChatTemplate(
        "{% for m in messages %}" + "{{ m.content }}{{ loop.index }}{{ loop.last }};" + "{% endfor %}"
    )
    expected = "".join(f"a{i + 1}{i == 9999};" for i in range(10_000))
    assert template.render([{"role": "user", "content": "a"}] * 10_000) == expected


def test_named_templates_are_chosen_by_tools() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert both.render(TALK) == "plain"
    assert both.render(TALK, tools=TOOLS) == "tools"
    with pytest.raises(RequestError, match="only rag"):
        ChatTemplate({"rag": "x"}).render(TALK)


def test_the_client_cannot_replace_the_conversation(smollm2: Tokenizer) -> None:
    assert "Hi" in smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], messages=[])


# Media ----------------------------------------------------------------------------------------------------------------

# Each reads contents in its own way: lists, images first; strings or lists (two); lists, with a look at the first part.
MEDIA_TEMPLATES = {
    "llava": (
        "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
        "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
        "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "qwen2_vl": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' or 'image' in part %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}"
        "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "gemma3": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] | replace('assistant', 'model') }}\n"
        "{% if m['content'] is string %}{{ m['content'] | trim }}{% elif m['content'] is iterable %}"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
        "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "smolvlm": (
        "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
        "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
PLACES = {
    "llava": "<image>\n",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "smolvlm": "<image>",
}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("family", MEDIA_TEMPLATES)
def test_prompts_with_images_are_those_of_transformers(family: str) -> None:
    source = MEDIA_TEMPLATES[family]
    template = ChatTemplate(source, {"bos_token": "<s>"})
    image, talk = {"type": "image"}, [text_part("Who"), {"type": "image"}, text_part("is this? "), {"type": "image"}]
    for content in ([image, text_part("What?")], [image], talk, [text_part("Only words.")]):
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [text_part("A cat.")]},
            {"role": "user", "content": [text_part("And now?")]},
        ]
        # What the server knows of an image beside its kind is not the template's; words alone come as a string.
        sent = [{**m, "content": m["content"][0]["text"] if m is not turns[0] else m["content"]} for m in turns]
        sent[0] = {**turns[0], "content": [{**part, "media": b""} if part is image else part for part in content]}
        assert template.render(sent) == reference(source, turns, add_generation_prompt=True)
    assert template.place_of("image") == PLACES[family]
    assert template.place_of("audio") is None


def test_a_message_with_an_image_can_be_continued() -> None:
    source = MEDIA_TEMPLATES["llava"]
    turns = [{"role": "user", "content": [{"type": "image"}, text_part("Who?")]}, {"role": "assistant", "content": "A"}]
    rendered = ChatTemplate(source).render(turns, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "USER: <image>\nWho? ASSISTANT: A"


@pytest.mark.parametrize("template", [TEMPLATES["plain"], TRIMMING, MEDIA_TEMPLATES["gemma3"]])
def test_media_that_a_template_knows_nothing_of_stand_before_the_text(template: str) -> None:
    given = ChatTemplate(template, placeholders={"image": "<img>", "video": "<clip>"})
    content = [text_part("Look:"), {"type": "video"}, {"type": "image"}, text_part("well")]
    image = given.place_of("image")
    assert f"<clip>\n{image}\nLook:\nwell" in given.render([{"role": "user", "content": content}])
    with pytest.raises(RequestError, match="no place for audio"):
        given.render([{"role": "user", "content": [{"type": "audio"}]}])


def test_a_template_that_refuses_the_trial_message_reads_text() -> None:
    picky = "{% if messages | length < 2 %}{{ raise_exception('two!') }}{% endif %}{{ messages[1].content }}"
    assert ChatTemplate(picky).render(TALK) == "Grüße 😀"
