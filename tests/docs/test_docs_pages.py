"""What pages say of the program is so: sentences of errors, flags, variables, targets of make."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from bough.cli.bench import MENU
from bough.cli.flags import OTHER_VARIABLES
from bough.core.gateway_settings import gateway_fields
from bough.core.settings import ALIASES, all_fields

ROOT = Path(__file__).parents[2]
PAGES = ("install", "quickstart", "deployment", "troubleshooting", "migration", "tuning")
SETTINGS = {f.name for _, f in all_fields()} | ALIASES.keys()
# Of commands, of the gateway's lists, and of other programs.
OTHER_FLAGS = {
    "--config",
    "--launch",
    "--plan",
    "--model",
    "--gpus",
    "--shm-size",
    "--rm",
    "--device",
    "--time",
    "--now",
}
OTHER_FLAGS |= {"--from-literal", "--index-url", "--constraint", "--temperature"}
GATEWAY_FLAGS = {"--" + f.name.replace("_", "-") for f in gateway_fields()} | {
    "--worker-urls",
    "--selector",
    "--api-key",
}


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


def known_flags() -> set[str]:
    return {"--" + name.replace("_", "-") for name in SETTINGS}


def spoken() -> list[str]:
    """Every text of the code, with … for what is filled in, as the page writes it."""
    found = []
    for path in (ROOT / "bough").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d+f|[sdr])", "…", node.value))
    return found


def test_the_code_says_each_sentence_that_troubleshooting_quotes() -> None:
    quoted = re.findall(r"^> (.+)$", text_of("troubleshooting"), re.MULTILINE)
    texts = spoken()
    assert len(quoted) > 25
    assert not [sentence for sentence in quoted if not any(sentence in text for text in texts)]


def bough_column(line: str) -> str:
    """Of a table's row what stands behind the other engine's column; of other lines all."""
    cells = line.split(" | ")
    return " | ".join(cells[1:]) if line.startswith("| ") else line


def test_the_flags_that_migration_names_exist() -> None:
    named = flags_of("\n".join(map(bough_column, text_of("migration").splitlines())))
    assert len(named) > 75
    assert not named - known_flags() - {"--model", "--port"}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "migration"])
def test_the_flags_and_variables_that_a_page_names_exist(page: str) -> None:
    text = text_of(page)
    assert not flags_of(text) - known_flags() - GATEWAY_FLAGS - OTHER_FLAGS
    variables = set(re.findall(r"\bBOUGH_[A-Z_]+", text)) - OTHER_VARIABLES
    assert not {name for name in variables if name.removeprefix("BOUGH_").lower() not in SETTINGS}


def test_every_extra_is_on_the_page_on_installing() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    users = extras - {"bench", "dev", "docs"}  # the others are for developers
    assert not [extra for extra in users if f"`{extra}`" not in text_of("install")]


def test_every_benchmark_is_on_its_page_and_those_of_a_checkout_come_last() -> None:
    rows = re.findall(r"^\| `bough bench (.+?) \|", text_of("benchmarking"), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"[a-z-]+", row)]
    assert sorted(listed) == sorted(MENU.commands)
    of_checkout = {name for name, command in MENU.commands.items() if command.module.startswith("tests.")}
    assert set(listed[listed.index("online") :]) == of_checkout


def test_the_targets_of_make_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        named |= set(re.findall(r"(?:`|^|&& )make ([a-z-]+)", path.read_text(), re.MULTILINE))
    assert {"wheel", "image", "docs"} <= named <= targets


def test_the_first_screen_names_what_its_figures_are_of_and_they_are_on_the_page_of_figures() -> None:
    screen = " ".join((ROOT / "README.md").read_text().partition("```")[0].split())
    measured = text_of("performance")
    figures = re.findall(r"\d\d,\d{3}", screen)
    assert len(figures) == 3 and not [figure for figure in figures if figure not in measured]
    said = (
        "NVIDIA H200",
        "Qwen3-0.6B's shape",
        "random weights",
        "bfloat16",
        "256 requests",
        "vLLM 0.26",
        "SGLang 0.5.17",
    )
    assert not [name for name in said if name not in screen]
    assert "(#what-it-does-not-do-yet)" in screen, "what is missing is one click away"


def test_the_readme_says_what_is_not_done_as_the_pages_and_the_code_do() -> None:
    section = (ROOT / "README.md").read_text().partition("## What it does not do yet")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- \*\*", section, re.MULTILINE)) >= 8
    section = " ".join(section.split())
    assert "never run on more than one GPU" in section and "not been run on more than one GPU" in text_of("scaling")
    assert "none has run there" in section and "Nothing has been run on an AMD device" in text_of("gpu-backends")
    assert "(0.6 ms per text)" in section and "0.6 ms per text" in " ".join(text_of("embeddings").split())
    assert "not on the Ubuntu that it names" in section and "not built on Ubuntu 24.04" in text_of("install")
    assert "nor run with a GPU" in section and "there was no GPU" in text_of("install")
    assert "not applied to a cluster" in section and "not applied to a cluster" in text_of("deployment")
