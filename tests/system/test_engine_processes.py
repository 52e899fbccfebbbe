"""The engine's processes: how they show, how they end, and that none survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

import bough
from bough import (
    Engine,
    EngineDeadError,
    ModelError,
    RequestError,
    ResourceError,
    SamplingParams,
    SettingsError,
)
from bough.client.inputs import Inputs
from bough.launch.client_end import ClientEnd
from tests.conftest import TINY_LLAMA
from tests.system.serving import until_idle

PATIENCE_S = 60.0


def tiny_engine(model: Path, **settings: object) -> Engine:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_total_tokens": 4096, "cpu_threads": 1}
    return Engine(model, **{**options, **settings})


ELSEWHERE: set[int] = set()  # children of engines that other tests keep alive


@pytest.fixture(autouse=True)
def only_my_children() -> Iterator[None]:
    ELSEWHERE.clear()
    ELSEWHERE.update(p.pid for p in children_of(os.getpid()))
    yield


def children_of(pid: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children()
    return [p for p in found if p.pid not in ELSEWHERE and "bough::" in " ".join(p.cmdline())]


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive, f"still there: {alive}"


def test_each_process_shows_its_role_and_shutdown_ends_them(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model)
    children = children_of(os.getpid())
    titles = {" ".join(p.cmdline()).strip() for p in children}
    assert {"bough::scheduler", "bough::detokenizer"} <= titles
    assert len(engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})["output_ids"]) <= 4
    engine.shutdown()
    engine.shutdown()
    wait_gone(children)
    with pytest.raises(EngineDeadError):
        engine.generate(input_ids=[1, 2, 3])


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_killing_one_ends_all_and_tells_every_caller(tiny_model: Path, role: str) -> None:
    engine = tiny_engine(tiny_model, context_length=4096)
    children = children_of(os.getpid())
    errors: list[BaseException] = []

    def wait_long() -> None:
        try:
            engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4000, "ignore_eos": True})
        except EngineDeadError as error:
            errors.append(error)

    callers = [threading.Thread(target=wait_long) for _ in range(3)]
    for caller in callers:
        caller.start()
    time.sleep(0.2)
    next(p for p in children if role in " ".join(p.cmdline())).kill()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert len(errors) == 3 and all(role in str(e) and "SIGKILL" in str(e) for e in errors)
    wait_gone(children)
    with pytest.raises(EngineDeadError, match=role):
        engine.generate(input_ids=[1])
    engine.shutdown()


def run_script(body: str, model: Path, *, wait: bool = True) -> subprocess.Popen[str]:
    """A script as a user would write it: no `__main__` guard. Control-C reaches it even where the tests themselves run
    in the background, which passes on that the signal is ignored."""
    code = f"""
import bough, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
def start(**more):
    return bough.Engine({str(model)!r}, load_format="dummy", skip_tokenizer_init=True, max_total_tokens=4096, **more)
""" + textwrap.dedent(body)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if wait:
        process.wait(PATIENCE_S)
    return process


@pytest.mark.slow
def test_a_script_without_a_guard_and_two_engines_in_one_process(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import bough
        options = dict(load_format="dummy", skip_tokenizer_init=True, max_total_tokens=4096)
        one = bough.Engine({str(tiny_model)!r}, **options)
        two = bough.Engine({str(tiny_model)!r}, **options)
        sampling = {{"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
        a = one.generate(input_ids=[1, 2, 3], sampling_params=sampling)
        b = two.generate(input_ids=[1, 2, 3], sampling_params=sampling)
        print(a["output_ids"] == b["output_ids"], len(a["output_ids"]))
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0 and done.stdout.strip() == "True 6", done.stderr


@pytest.mark.slow
def test_a_killed_parent_leaves_no_orphan(tiny_model: Path) -> None:
    process = run_script('e = start(); print("up", flush=True); time.sleep(600)', tiny_model, wait=False)
    assert process.stdout is not None and process.stdout.readline().strip() == "up"
    children = children_of(process.pid)
    assert len(children) == 2
    process.kill()
    process.wait(PATIENCE_S)
    wait_gone(children)


@pytest.mark.slow
def test_control_c_in_generate_aborts_and_ends_cleanly(tiny_model: Path) -> None:
    body = """
    e = start(context_length=4096)
    try:
        print("up", flush=True)
        e.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 4000, "ignore_eos": True})
    except KeyboardInterrupt:
        for _ in range(500):
            if e.get_server_info()["internal_states"][0]["num_running_reqs"] == 0:
                break
            time.sleep(0.01)
        print("aborted", e.get_server_info()["internal_states"][0]["num_running_reqs"], flush=True)
        print(len(e.generate(input_ids=[3], sampling_params={"max_new_tokens": 2, "ignore_eos": True})["output_ids"]))
    """
    process = run_script(body, tiny_model, wait=False)
    assert process.stdout is not None and process.stdout.readline().strip() == "up"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out.split() == ["aborted", "0", "2"] and process.returncode == 0, err


@pytest.mark.slow
def test_control_c_in_a_stream_aborts_it_and_the_engine_serves_on(tiny_model: Path) -> None:
    body = """
    e = start(context_length=4096)
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    try:
        for i, piece in enumerate(e.generate(input_ids=[1, 2], sampling_params=sampling, stream=True, rid="r")):
            if i == 5:
                print("up", flush=True)
    except KeyboardInterrupt:
        for _ in range(500):
            if e.get_server_info()["internal_states"][0]["num_running_reqs"] == 0:
                break
            time.sleep(0.01)
        print("aborted", e.get_server_info()["internal_states"][0]["num_running_reqs"], flush=True)
        sampling["max_new_tokens"] = 2
        print(len(e.generate(input_ids=[3], sampling_params=sampling, rid="r")["output_ids"]))
    """
    process = run_script(body, tiny_model, wait=False)
    assert process.stdout is not None and process.stdout.readline().strip() == "up"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out.split() == ["aborted", "0", "2"] and process.returncode == 0, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_idle_engine_burns_no_cpu(tiny_model: Path) -> None:
    with tiny_engine(tiny_model) as engine:
        engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
        until_idle(children_of(os.getpid()))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"model": "no-such-model"}, ModelError, "no-such-model"),
        ({"max_total_tokens": 10**12}, ResourceError, "max-total-tokens"),
        ({"page_siz": 3}, SettingsError, "Did you mean 'page_size'"),
        ({"schedule_policy": "best"}, SettingsError, "fcfs"),
        ({"context_length": 0}, SettingsError, "context_length"),
    ],
)
def test_a_start_that_cannot_work_says_why(
    tiny_model: Path, change: dict[str, object], kind: type[Exception], words: str
) -> None:
    settings = {"model": str(tiny_model), "load_format": "dummy", "skip_tokenizer_init": True, **change}
    with pytest.raises(kind, match=words):
        Engine(**settings)
    assert not children_of(os.getpid())


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": '{"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}'}, "NobodysForCausalLM"),
        ({"config.json": '{"architectures": '}, r"config\.json"),
        ({"config.json": json.dumps(TINY_LLAMA), "model.safetensors": "\x7f" * 500}, r"model\.safetensors is damaged"),
        ({"config.json": json.dumps(TINY_LLAMA)}, "has no tokenizer"),
    ],
)
def test_a_folder_without_a_tokenizer_is_told_what_matters_most(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=words):
        Engine(tmp_path)
    assert not children_of(os.getpid())


@pytest.mark.slow
def test_a_childs_own_error_is_preferred_to_a_missing_tokenizer(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = threading.Event()
    die = ClientEnd.die

    def note(self: ClientEnd, error: EngineDeadError) -> None:
        died.set()
        die(self, error)

    def no_tokenizer(*arguments: object) -> None:
        assert died.wait(PATIENCE_S)
        raise ModelError("has no tokenizer")

    monkeypatch.setattr(ClientEnd, "die", note)
    monkeypatch.setattr("bough.launch.engine_processes.open_tokenizer", no_tokenizer)
    with pytest.raises(ResourceError, match="max-total-tokens"):
        tiny_engine(tiny_model, max_total_tokens=10**12)


def test_a_request_that_slips_past_the_checks_is_refused_alone(tiny_model: Path) -> None:
    with tiny_engine(tiny_model) as engine:
        prompt = engine._reader.read(input_ids=[1, 2, 3]).prompts[0]
        wrong = {"rid": 5, "seed": "x", "namespace": 7, "priority": 1.5, "logprobs": 3}
        wrong["sampling"] = SamplingParams(stop="x")  # type: ignore[arg-type]
        for field, value in wrong.items():
            inputs = Inputs((msgspec.structs.replace(prompt, **{field: value}),), batched=False)
            with pytest.raises(RequestError, match="cannot be read"):
                engine._wait(engine._client.generate(inputs))
        assert "output_ids" in engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})


@pytest.mark.slow
def test_a_cut_prompt_is_billed_as_it_was_used(tiny_model: Path) -> None:
    with tiny_engine(tiny_model, context_length=64, allow_auto_truncate=True) as engine:
        ids = [2 + i % 100 for i in range(200)]
        output = engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 4}, return_prompt_token_ids=True)
        assert output["meta_info"]["prompt_tokens"] == 63 and output["meta_info"]["prompt_token_ids"] == ids[:63]


@pytest.mark.slow
def test_files_in_the_users_folder_are_not_imported(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('a stranger was imported')")
    code = f"""
    import bough
    with bough.Engine({str(tiny_model)!r}, load_format="dummy", skip_tokenizer_init=True, max_total_tokens=4096) as e:
        print(len(e.generate(input_ids=[1], sampling_params=dict(max_new_tokens=2, ignore_eos=True))["output_ids"]))
    """
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(code))
    path = os.pathsep.join([str(Path(bough.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0 and done.stdout.strip() == "2", done.stderr


@pytest.mark.slow
def test_an_engine_that_is_forgotten_on_its_own_thread_still_ends(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model)
    children = children_of(os.getpid())
    loop, finalize = engine._link.loop, engine._at_exit
    loop.call_soon_threadsafe(finalize)  # as the garbage collector does, when it runs there
    wait_gone(children)
    for thread in threading.enumerate():
        if thread.name == "bough-cleanup":
            thread.join(PATIENCE_S)
    assert loop.is_closed()


@pytest.mark.slow
def test_sigterm_ends_a_command_in_order(tiny_model: Path, tmp_path: Path) -> None:
    load = ["--num-prompts", "1", "--input-len", "4", "--output-len", "4000", "--vocab", "100"]
    options = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-total-tokens", "4096", "--cpu-threads", "1"]
    command = [sys.executable, "-m", "bough.cli.main", "bench", "offline", *load, *options]
    command += ["--model", str(tiny_model), "--context-length", "4096", "--repeat", "1000"]
    process = subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(children := children_of(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(children) == 2 and list(tmp_path.glob("bough-*"))
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143 and errors == ""
    wait_gone(children)
    assert list(tmp_path.glob("bough-*")) == []


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}')
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        Engine(tmp_path, load_format="dummy", skip_tokenizer_init=True)


def test_corrupt_weights_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 64)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        Engine(broken)
