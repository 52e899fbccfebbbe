"""How the kernels come to be compiled, and what is said where they cannot be: by the installation, by the command."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bough.cli import build_kernels
from bough.core.errors import ResourceError
from bough.native import build
from bough.native.library import PACKAGE, cpu_name

ROOT = PACKAGE.parents[1]
MakeCompiler = Callable[[str], str]


@pytest.fixture
def make_compiler(tmp_path: Path) -> MakeCompiler:
    """A compiler that is a shell script."""

    def make(script: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    return made


def test_without_a_compiler_it_is_said_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build.BuildError, match=r"install one .* and run `bough build-kernels`"):
        build.build(folder)


def test_a_compiler_that_refuses_leaves_nothing_behind(folder: Path, make_compiler: MakeCompiler) -> None:
    with pytest.raises(build.BuildError, match="no such thing"):
        build.build(folder, make_compiler("echo no such thing >&2; exit 1"))
    assert not list(folder.iterdir())


def test_the_compiler_may_be_a_command_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -m cc")
    assert build.compiler() == f"{sys.executable} -m cc"
    monkeypatch.setenv("CC", "nothing-of-that-name")
    assert build.compiler() != "nothing-of-that-name"


@pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
def test_a_compiler_that_knows_no_variant_makes_the_plain_ones(
    folder: Path, make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMMON", [flag for flag in build.COMMON if flag != "-O3"])  # it only has to be there
    real = build.compiler()
    old = make_compiler(f'for flag in "$@"; do case "$flag" in -mavx*|-march=*) exit 1;; esac; done; exec {real} "$@"')
    library = ctypes.CDLL(str(build.build(folder, old)))
    library.bough_linear_variant.restype = ctypes.c_char_p
    assert [library.bough_linear_variant(3, prompt) for prompt in (False, True)] == [b"plain", b"plain"]


def test_a_new_library_takes_the_place_of_older_ones(folder: Path, make_compiler: MakeCompiler) -> None:
    touch = make_compiler('while [ "$1" != -o ]; do shift; done; : > "$2"')
    digest = build.library_name().rpartition("-")[2]
    stale = folder / build.library_name().replace(digest, "0123456789abcdef.so")
    stale.touch()
    made = build.build(folder, touch)
    assert [path.name for path in folder.iterdir()] == [made.name] == [build.library_name()]


# ---- while Bough is installed


class App:
    """What a hook may say."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


def load_hook(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook as hatchling makes it, which is there only while it builds."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hook_under_test", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = module.KernelsHook()
    hook.root, hook.app = str(tree), App()
    return hook


def run_hook(hook: Any) -> dict[str, Any]:
    """What it adds to the wheel."""
    data: dict[str, Any] = {"artifacts": [], "force_include": {}}
    hook.initialize("standard", data)
    return data


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    native = tmp_path / "tree" / "bough" / "native"
    shutil.copytree(PACKAGE, native, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path / "tree"


def test_an_installation_carries_the_library(
    tree: Path, make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", make_compiler('while [ "$1" != -o ]; do shift; done; : > "$2"'))
    hook = load_hook(tree, monkeypatch)
    data = run_hook(hook)
    assert data["artifacts"] == [f"bough/native/{build.library_name()}"] and (tree / data["artifacts"][0]).exists()
    assert data["pure_python"] is False and data["tag"].startswith("py3-none-") and not hook.app.warnings


def test_a_tree_that_cannot_be_written_is_installed_with_the_library_too(
    tree: Path, make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", make_compiler('while [ "$1" != -o ]; do shift; done; : > "$2"'))
    hook = load_hook(tree, monkeypatch)
    before, real = set(tree.rglob("*")), os.access
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: real(path, mode) and tree not in Path(path).parents)
        data = run_hook(hook)
    [(library, place)] = data["force_include"].items()
    assert Path(library).exists() and place == f"bough/native/{build.library_name()}" and not data["artifacts"]
    hook.finalize("standard", data, "a wheel")
    assert not Path(library).parent.exists() and {p for p in tree.rglob("*") if "__pycache__" not in str(p)} == before


@pytest.mark.parametrize("reason", ["no compiler", "it refuses"])
def test_an_installation_without_the_library_succeeds(
    tree: Path, make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setenv("PATH", str(tree))
    monkeypatch.delenv("CC", raising=False)
    if reason == "it refuses":
        monkeypatch.setenv("CC", make_compiler("exit 1"))
    hook = load_hook(tree, monkeypatch)
    assert run_hook(hook) == {"artifacts": [], "force_include": {}}
    [warning] = hook.app.warnings
    assert "torch does their work" in warning


# ---- afterwards


def test_the_command_says_where_the_library_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(build_kernels, "build_library", lambda: tmp_path / "library.so")
    assert build_kernels.run([]) == 0 and capsys.readouterr().out == f"{tmp_path / 'library.so'}\n"

    def refuse() -> Path:
        raise build.BuildError("There is no C compiler.")

    monkeypatch.setattr(build_kernels, "build_library", refuse)
    with pytest.raises(ResourceError, match="no C compiler"):
        build_kernels.run([])


def test_where_the_package_cannot_be_written_the_library_goes_to_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bough.native import library

    built: list[Path] = []
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path))
    monkeypatch.setattr(library, "os", SimpleNamespace(access=lambda *asked: False, W_OK=os.W_OK))
    monkeypatch.setattr(library, "build", lambda folder: built.append(folder) or folder / "library.so")
    assert library.build_library() == tmp_path / "native" / "library.so" and built[0].is_dir()


def test_a_cpu_is_called_by_what_is_used_of_it(any_tier: ctypes.CDLL) -> None:
    any_tier.bough_cpu_features.restype = ctypes.c_uint
    assert cpu_name().endswith(f"-{any_tier.bough_cpu_features():x}")
