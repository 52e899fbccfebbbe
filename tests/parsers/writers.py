"""How models of each format write calls: the other direction of the parsers, for round trips."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from bough.parsers.formats.base import Shape

Args = dict[str, Any]
Given = Sequence[tuple[str, Args]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    """A value as it stands in formats without quotes."""
    return value if isinstance(value, str) else _json(value)


def _each(write: Callable[[str, Args], str], between: str = "\n") -> Callable[[Given], str]:
    return lambda calls: between.join(write(name, args) for name, args in calls)


hermes = _each(lambda name, args: f'<tool_call>\n{{"name": {_json(name)}, "arguments": {_json(args)}}}\n</tool_call>')
interns1 = _each(
    lambda name, args: (
        f'<|action_start|> <|plugin|>\n{{"name": {_json(name)}, "parameters": {_json(args)}}}<|action_end|>'
    )
)
llama3 = _each(lambda name, args: f'{{"name": {_json(name)}, "parameters": {_json(args)}}}', "; ")
mistral_compact = _each(lambda name, args: f"[TOOL_CALLS]{name}[ARGS]{_json(args)}", "")


def llama3_tagged(calls: Given) -> str:
    return "<|python_tag|>" + llama3(calls)


def mistral(calls: Given) -> str:
    return "[TOOL_CALLS] " + _json([{"name": name, "arguments": args} for name, args in calls])


def deepseekv3(calls: Given) -> str:
    written = _each(
        lambda name, args: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(args)}\n```<｜tool▁call▁end｜>"
        )
    )
    return f"<｜tool▁calls▁begin｜>{written(calls)}<｜tool▁calls▁end｜>"


def deepseekv31(calls: Given) -> str:
    written = _each(lambda name, args: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(args)}<｜tool▁call▁end｜>", "")
    return f"<｜tool▁calls▁begin｜>{written(calls)}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Given) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(args)}<|tool_call_end|>"
        for i, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def glm45(calls: Given) -> str:
    def write(name: str, args: Args) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in args.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return _each(write)(calls)


def glm47(calls: Given) -> str:
    def write(name: str, args: Args) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{_plain(value)}</arg_value>" for key, value in args.items()
        )
        return f"<tool_call>{name}{pairs}</tool_call>"

    return _each(write, "")(calls)


def qwen3_coder(calls: Given) -> str:
    def write(name: str, args: Args) -> str:
        pairs = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in args.items())
        return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"

    return _each(write)(calls)


def _invoke(prefix: str, name: str, args: Args, kinds: bool = False) -> str:
    def kind(value: Any) -> str:
        return f' string="{_json(isinstance(value, str))}"' if kinds else ""

    pairs = "".join(
        f'<{prefix}parameter name="{key}"{kind(value)}>{_plain(value)}</{prefix}parameter>\n'
        for key, value in args.items()
    )
    return f'<{prefix}invoke name="{name}">\n{pairs}</{prefix}invoke>'


def minimax_m2(calls: Given) -> str:
    return f"<minimax:tool_call>\n{_each(lambda name, args: _invoke('', name, args))(calls)}\n</minimax:tool_call>"


def _dsml(section: str) -> Callable[[Given], str]:
    written = _each(lambda name, args: _invoke("｜DSML｜", name, args, kinds=True))
    return lambda calls: f"<｜DSML｜{section}>\n{written(calls)}\n</｜DSML｜{section}>"


deepseekv32 = _dsml("function_calls")
deepseekv4 = _dsml("tool_calls")


def step3(calls: Given) -> str:
    written = _each(
        lambda name, args: (
            f"<｜tool_call_begin｜>function<｜tool_sep｜>{_invoke('steptml:', name, args)}<｜tool_call_end｜>"
        )
    )
    return f"<｜tool_calls_begin｜>\n{written(calls)}\n<｜tool_calls_end｜>"


def pythonic(calls: Given) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
    return f"[{', '.join(written)}]"


def lfm2(calls: Given) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def apertus2509(calls: Given) -> str:
    return f"<|tools_prefix|>{_json([{name: args} for name, args in calls])}<|tools_suffix|>"


def cohere(calls: Given) -> str:
    listed = [{"tool_call_id": str(i), "tool_name": name, "parameters": args} for i, (name, args) in enumerate(calls)]
    return f"<|START_ACTION|>{json.dumps(listed, ensure_ascii=False, indent=1)}<|END_ACTION|>"


def dots(calls: Given) -> str:
    return f"<dots_function_call>\n{_each(lambda name, args: _invoke('', name, args))(calls)}\n</dots_function_call>"


dots_json = _each(
    lambda name, args: (
        f'<dots_function_call>\n{{"name": {_json(name)}, "arguments": {_json(args)}}}\n</dots_function_call>'
    )
)


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return _json(value)


gemma4 = _each(lambda name, args: f"<|tool_call>call:{name}{_gemma_value(args)}<tool_call|>", "")
gigachat3 = _each(
    lambda name, args: (
        f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": {_json(name)}, "arguments": {_json(args)}}}'
    )
)
gigachat3_inline = _each(
    lambda name, args: f'<|function_call|>{{"name": {_json(name)}, "arguments": {_json(args)}}}', ""
)


def _hunyuan(word: str) -> Callable[[Given], str]:
    def write(name: str, args: Args) -> str:
        pairs = "".join(
            f"<arg_key{word}>{key}</arg_key{word}>\n<arg_value{word}>{_plain(value)}</arg_value{word}>\n"
            for key, value in args.items()
        )
        return f"<tool_call{word}>{name}<tool_sep{word}>\n{pairs}</tool_call{word}>"

    return lambda calls: f"<tool_calls{word}>\n{_each(write)(calls)}\n</tool_calls{word}>"


hunyuan, hunyuan_worded = _hunyuan(""), _hunyuan(":opensource")
inkling = _each(
    lambda name, args: (
        f'<|message_model|>{name}<|content_invoke_tool_json|>{{"name":{_json(name)},"args":{_json(args)}}}<|end_message|>'
    ),
    "",
)


def kimi_k3(calls: Given) -> str:
    def argument(key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "number"
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{_plain(value)}<|close|>argument<|sep|>'

    written = "".join(
        f'<|open|>call tool="{name}" index="{i}"<|sep|>'
        f"{''.join(argument(key, value) for key, value in args.items())}<|close|>call<|sep|>"
        for i, (name, args) in enumerate(calls)
    )
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|>"


def minicpm5(calls: Given) -> str:
    def write(name: str, args: Args) -> str:
        pairs = "".join(f'<param name="{key}">{_plain(value)}</param>' for key, value in args.items())
        return f'<function name="{name}">{pairs}</function>'

    return _each(write)(calls)


def minimax_m3(calls: Given) -> str:
    token = "]<]minimax[>["

    def write(name: str, args: Args) -> str:
        pairs = "".join(f"{token}<{key}>{_plain(value)}{token}</{key}>" for key, value in args.items())
        return f'{token}<invoke name="{name}">{pairs}{token}</invoke>'

    return f"{token}<tool_call>\n{_each(write)(calls)}\n{token}</tool_call>"


def muse(calls: Given) -> str:
    written = _each(
        lambda name, args: (
            f"<|start|>assistant to={name}<|message|><atem:function_calls>\n{_invoke('atem:', name, args)}\n"
            "</atem:function_calls><|eom|>"
        ),
        "",
    )
    return written(calls)


gpt_oss = _each(
    lambda name, args: (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(args)}<|call|>"
    ),
    "",
)


def in_shape(shape: Shape, calls: Given) -> str:
    """Calls as a grammar over a format's shape has them."""

    def arguments(args: Args) -> str:
        if shape.argument is None:
            return _json(args)
        write = shape.argument
        return "".join(
            f"{write(key, isinstance(value, str))}{_plain(value)}{shape.argument_end}" for key, value in args.items()
        )

    written = shape.between.join(f"{shape.begin(name)}{arguments(args)}{shape.end}" for name, args in calls)
    return f"{shape.before}{written}{shape.after}"


# (name of the parser, a way to write): some formats have two.
WRITERS: list[tuple[str, Callable[[Given], str]]] = [
    ("apertus2509", apertus2509),
    ("cohere_command4", cohere),
    ("deepseekv3", deepseekv3),
    ("deepseekv31", deepseekv31),
    ("deepseekv32", deepseekv32),
    ("deepseekv4", deepseekv4),
    ("dots", dots),
    ("dots", dots_json),
    ("gemma4", gemma4),
    ("gigachat3", gigachat3),
    ("gigachat3", gigachat3_inline),
    ("glm", glm45),
    ("glm45", glm45),
    ("glm47", glm47),
    ("gpt-oss", gpt_oss),
    ("hermes", hermes),
    ("hunyuan", hunyuan),
    ("hunyuan", hunyuan_worded),
    ("inkling", inkling),
    ("interns1", interns1),
    ("kimi_k2", kimi_k2),
    ("kimi_k3", kimi_k3),
    ("lfm2", lfm2),
    ("llama3", llama3),
    ("llama3", llama3_tagged),
    ("mimo", qwen3_coder),
    ("minicpm5", minicpm5),
    ("minimax-m2", minimax_m2),
    ("minimax-m3", minimax_m3),
    ("mistral", mistral),
    ("mistral", mistral_compact),
    ("muse", muse),
    ("poolside_v1", glm45),
    ("pythonic", pythonic),
    ("qwen", hermes),
    ("qwen25", hermes),
    ("qwen3_coder", qwen3_coder),
    ("step3", step3),
    ("step3p5", qwen3_coder),
    ("trinity", hermes),
]
WRITER_IDS = [f"{name}-{i}" for i, (name, _) in enumerate(WRITERS)]
