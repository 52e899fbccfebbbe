"""How models of each format write calls: the other direction of the parsers, for round trips."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

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


gpt_oss = _each(
    lambda name, args: (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(args)}<|call|>"
    ),
    "",
)

# (name of the parser, a way to write): some formats have two.
WRITERS: list[tuple[str, Callable[[Given], str]]] = [
    ("deepseekv3", deepseekv3),
    ("deepseekv31", deepseekv31),
    ("deepseekv32", deepseekv32),
    ("deepseekv4", deepseekv4),
    ("glm", glm45),
    ("glm45", glm45),
    ("glm47", glm47),
    ("gpt-oss", gpt_oss),
    ("hermes", hermes),
    ("interns1", interns1),
    ("kimi_k2", kimi_k2),
    ("lfm2", lfm2),
    ("llama3", llama3),
    ("llama3", llama3_tagged),
    ("mimo", qwen3_coder),
    ("minimax-m2", minimax_m2),
    ("mistral", mistral),
    ("mistral", mistral_compact),
    ("pythonic", pythonic),
    ("qwen", hermes),
    ("qwen25", hermes),
    ("qwen3_coder", qwen3_coder),
    ("step3", step3),
    ("step3p5", qwen3_coder),
]
WRITER_IDS = [f"{name}-{i}" for i, (name, _) in enumerate(WRITERS)]
