from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeEngine, run_with

from bough.cli import bench
from bough.cli.commands import Command, Parser, without_keys
from bough.cli.main import MENU, main
from bough.core.errors import EngineDeadError, ModelError
from bough.version import __version__

Capture = pytest.CaptureFixture[str]


def test_help_lists_every_command_with_a_line(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"  {name} " in page and command.summary in page for name, command in MENU.commands.items())
    assert main([]) == 0
    assert capsys.readouterr().out == page


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bough {__version__}\n"


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "bough", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"bough {__version__}\n", "")


@pytest.mark.parametrize("name", MENU.commands)
def test_every_command_has_a_help_page(name: str, capsys: Capture) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: bough {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["genrate"], "bough: unknown command 'genrate'. Did you mean generate?"),
        (["xyzzy"], "bough: unknown command 'xyzzy'. `bough --help` lists them all."),
        (["--vresion"], "bough: unknown flag --vresion. Did you mean --version?"),
        (["bench", "tee"], "bough: unknown command 'tee'. Did you mean tree?"),
        (["generate", "--page-siz", "2"], "bough generate: error: unknown flag --page-siz. Did you mean --page-size?"),
        (["generate", "a", "--page-size", "3"], "bough: page_size must be one of 1, 2, 4, 8, 16, 32, 64, 128; got 3."),
        (["generate", "a", "b"], "bough generate: error: unexpected 'b'; put quotes around text that holds spaces."),
        (
            ["chat", "--system", "a", "b"],
            "bough chat: error: unexpected 'b'; put quotes around text that holds spaces.",
        ),
        (["doctor", "a", "foo"], "bough doctor: error: unexpected 'foo'. `bough doctor --help` lists what there is."),
        (["gateway", "rol"], "bough gateway: error: unexpected 'rol'. Did you mean roll?"),
        (["gateway", "foo"], "bough gateway: error: unexpected 'foo'. `bough gateway --help` lists what there is."),
        (
            ["gateway", "--port", "3", "top"],
            "bough gateway: error: unexpected 'top'; put it first: `bough gateway top`.",
        ),
    ],
)
def test_what_cannot_be_used_ends_with_a_line_and_code_2(argv: list[str], line: str, capsys: Capture) -> None:
    engine = FakeEngine()
    assert run_with(engine.make, argv) == 2
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == ("", line + "\n")
    assert engine.settings is None, "an engine was started for a command line that cannot be used"


def test_errors_of_bough_are_one_sentence_and_code_1(capsys: Capture) -> None:
    def fails(settings: dict[str, Any]) -> Any:
        raise ModelError("There is no such model.")

    assert run_with(fails, ["generate", "a"]) == 1
    assert capsys.readouterr().err == "bough: There is no such model.\n"


def test_a_dead_engine_is_reported_and_closed(capsys: Capture) -> None:
    engine = FakeEngine(["Hel", EngineDeadError("The scheduler process ended.")])
    assert run_with(engine.make, ["generate", "a"]) == 1
    assert capsys.readouterr().err == "bough: The scheduler process ended.\n"
    assert engine.closed


def test_interrupt_is_quiet_and_closes_the_engine(capsys: Capture) -> None:
    engine = FakeEngine(["Hel", KeyboardInterrupt()])
    assert run_with(engine.make, ["generate", "a"]) == 130
    assert capsys.readouterr().err == ""
    assert engine.closed


def test_sigterm_is_quiet_and_closes_the_engine(capsys: Capture) -> None:
    class Ended(FakeEngine):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("still here")

    engine, before = Ended(), signal.getsignal(signal.SIGTERM)
    assert run_with(engine.make, ["generate", "a"]) == 143
    assert capsys.readouterr().err == ""
    assert engine.closed and signal.getsignal(signal.SIGTERM) == before


def test_a_thread_may_run_a_command_too(capsys: Capture) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["--version"])))
    thread.start()
    thread.join()
    assert codes == [0]


def test_defects_are_not_hidden() -> None:
    for defect in (ZeroDivisionError(), OSError(errno.EBADF, "Bad file descriptor")):
        with pytest.raises(type(defect)):
            run_with(FakeEngine([defect]).make, ["generate", "a"])


def test_bench_hands_over_its_words(capsys: Capture) -> None:
    assert main(["bench", "tree", "--prompts", "10", "--length", "8"]) == 0
    assert "match_us" in capsys.readouterr().out


def test_benchmarks_of_single_parts_need_a_checkout(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "tests.bench.tree", None)  # as where only the wheel is installed
    assert main(["bench", "tree"]) == 2
    assert capsys.readouterr().err == (
        "bough: `bough bench tree` is for developers: run it in a checkout of Bough's source.\n"
    )


@pytest.mark.parametrize("command", bench.MENU.commands.values(), ids=bench.MENU.commands)
def test_every_flag_of_a_benchmark_has_a_help_text(command: Command) -> None:
    parser = Parser(program="bough bench", about="")
    importlib.import_module(command.module).add_flags(parser)
    assert [action.option_strings for action in parser._actions if not action.help] == []


@pytest.mark.parametrize("argv", [["models"], ["models", "--help"]])
def test_a_reader_that_leaves_ends_the_command_quietly(argv: list[str]) -> None:
    code = f"import sys; from bough.cli.main import main; sys.exit(main({argv!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 141
    child.stderr.close()


PRINT_A_VERSION = "from bough.cli.main import main; sys.exit(main(['--version']))"
GENERATE_A_WORD = (
    "from cli_fakes import FakeEngine, run_with; engine = FakeEngine(['x'])\n"
    "code = run_with(engine.make, ['generate', 'a'])\n"
    "assert engine.closed\n"
    "sys.exit(code)\n"
)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("code", [PRINT_A_VERSION, GENERATE_A_WORD])
def test_a_full_disk_is_one_line(code: str, unbuffered: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{code}"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    line = "bough: Cannot write: No space left on device. Make room there, or write elsewhere.\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_a_file_for_which_there_is_no_room_is_named(capsys: Capture) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "out.json")
    assert run_with(FakeEngine([full]).make, ["generate", "a"]) == 1
    assert capsys.readouterr().err.startswith("bough: Cannot write: No space left on device (out.json).")
    long = OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000)
    assert run_with(FakeEngine([long]).make, ["generate", "a"]) == 1
    assert capsys.readouterr().err == f"bough: No file can have so long a name: {'x' * 100}…\n"


def test_light_commands_load_nothing_heavy() -> None:
    """Help pages and the list of models must appear at once."""
    code = (
        "import sys; from bough.cli.main import main\n"
        "for argv in ([], ['models'], ['generate', '--help'], ['chat', '--help'], ['bench', '--help']): main(argv)\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'zmq', 'huggingface_hub', 'rich', 'yaml', 'numpy'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["bough", "serve", "--api-key", "abc", "--port", "1"], ["bough", "serve", "--api-key", "***", "--port", "1"]),
        (
            ["bough", "--admin-api-key=abc", "--worker_api_key=abc"],
            ["bough", "--admin-api-key=***", "--worker_api_key=***"],
        ),
        (["bough", "--api-key", "a", "--api-key", "b"], ["bough", "--api-key", "***", "--api-key", "***"]),
        (["bough", "--api-key"], ["bough", "--api-key"]),
        (["bough", "--model", "m"], ["bough", "--model", "m"]),
    ],
)
def test_keys_are_hidden_in_a_command_line(given: list[str], shown: list[str]) -> None:
    assert without_keys(given) == shown
