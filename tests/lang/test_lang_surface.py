"""The language's surface: a program written for SGLang finds every name and argument it uses."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest

import bough as sgl

SAMPLING = (
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)
CONSTRAINTS = ("dtype", "choices", "choices_method", "regex", "json_schema")
PROGRAM = sgl.function(lambda s: None)


def names_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            sgl.gen,
            [
                "name",
                "max_tokens",
                "min_tokens",
                *SAMPLING,
                "dtype",
                "choices",
                "choices_method",
                "regex",
                "json_schema",
                "lora_path",
            ],
        ),
        (sgl.gen_float, ["name", "max_tokens", "n", "stop", "arguments"]),
        (sgl.gen_int, ["name", "max_tokens", "n", "stop", "arguments"]),
        (sgl.gen_string, ["name", "max_tokens", "n", "stop", "arguments"]),
        (sgl.select, ["name", "choices", "temperature", "choices_method"]),
        (sgl.image, ["expr"]),
        (sgl.video, ["path", "num_frames"]),
        (sgl.separate_reasoning, ["expr", "model_type"]),
        (sgl.system, ["expr"]),
        (sgl.user, ["expr"]),
        (sgl.assistant, ["expr"]),
        (sgl.function, ["func", "num_api_spec_tokens"]),
        (sgl.OpenAI, ["model", "is_chat_model", "chat_template", "client_args"]),
        (sgl.Anthropic, ["model", "client_args"]),
        (sgl.LiteLLM, ["model", "args"]),
        (sgl.RuntimeEndpoint, ["base_url", "api_key", "verify", "chat_template_name"]),
    ],
)
def test_arguments_stand_in_their_places(function: Any, names: list[str]) -> None:
    assert names_of(function) == names


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("run", {"stream", "backend", "use_thread", "timeout_s"}),
        ("run_batch", {"backend", "num_threads", "progress_bar", "generator_style", "timeout_s"}),
    ],
)
def test_runs_take_the_defaults_of_all_generations(method: str, own: set[str]) -> None:
    parameters = inspect.signature(getattr(PROGRAM, method)).parameters
    assert parameters.keys() >= {"max_new_tokens", *SAMPLING, *own}
    defaults = {name: parameters[name].default for name in ("max_new_tokens", "n", "temperature", "top_p", "top_k")}
    assert defaults == {"max_new_tokens": 128, "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}


def test_programs_states_and_groups_have_their_methods() -> None:
    for name in ("run", "run_batch", "bind", "trace", "cache", "async_run", "async_run_batch", "async_iter_batch"):
        assert callable(getattr(PROGRAM, name))
    for name in (
        *("fork", "copy", "var_scope", "text", "messages", "sync", "error", "text_iter", "text_async_iter"),
        *("get_var", "set_var", "get_meta_info", "system", "user", "assistant", "get_usage", "cancel"),
        *("async_get_var", "async_sync", "__getitem__", "__setitem__", "__contains__", "__iadd__"),
    ):
        assert callable(getattr(sgl.ProgramState, name))


def test_the_names_load_without_vendors_sdks_and_without_torch() -> None:
    code = (
        "import sys, bough as sgl\n"
        "for name in sgl.__all__: getattr(sgl, name) if name != 'Engine' else None\n"
        "assert not {'openai', 'anthropic', 'litellm', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_regexes_of_types_are_sglangs() -> None:
    assert (sgl.REGEX_INT, sgl.REGEX_FLOAT) == (r"[-+]?[0-9]+[ \n]*", r"[-+]?[0-9]*\.?[0-9]+[ \n]*")
    assert (sgl.REGEX_BOOL, sgl.REGEX_STR) == (r"(True|False)", r'"[\w\d\s]*"')


def test_the_package_is_typed() -> None:
    assert files("bough").joinpath("py.typed").is_file()
    assert inspect.signature(sgl.gen).return_annotation == "Expr"


def test_back_ends_that_are_not_made_here_say_what_to_use() -> None:
    with pytest.raises(sgl.SettingsError, match=r"LiteLLM\('vertex_ai/gemini-pro'\)"):
        sgl.VertexAI("gemini-pro")
    with pytest.raises(sgl.SettingsError, match=r"OpenAI\('llama', base_url="):
        sgl.Crusoe("llama")


def test_the_names_are_listed() -> None:
    assert {"gen", "function", "Engine", "VertexAI"} < set(dir(sgl))


def test_a_program_looks_like_the_function_that_it_was_made_of() -> None:
    def body(s: Any, question: str) -> None:
        """Asks."""

    program: Any = sgl.function(body)
    assert (program.__name__, program.__doc__, program.__module__) == ("body", "Asks.", __name__)
    assert program.__wrapped__ is body and names_of(program) == ["s", "question"]


@pytest.mark.parametrize("name", ["stream", "use_thread", "temprature"])
def test_an_async_batch_refuses_what_it_would_not_heed(name: str) -> None:
    with pytest.raises(TypeError, match=f"no argument '{name}'"):
        given: Any = {name: True}
        asyncio.run(PROGRAM.async_run_batch([{}], **given))
