from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from bough.core.errors import ModelError
from bough.core.settings import ModelSettings
from bough.loader import catalogue
from bough.loader.locate import ModelFiles, find_files, gguf_parts, locate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration, a tokenizer and one weights file."""
    model = tmp_path / "My-Model"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").touch()
    return model


@pytest.mark.parametrize("name", [None, "smollm2"])
def test_default_and_catalogue_names_are_pulled(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "pull", lambda entry, progress: tmp_path / entry.source.file_name)
    files = locate(name)
    assert files == ModelFiles("SmolLM2-135M-Instruct", tmp_path, tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_folder_of_safetensors(folder: Path) -> None:
    assert locate(str(folder)) == ModelFiles(
        name="My-Model",
        folder=folder,
        safetensors=(folder / "model.safetensors",),
        config=folder / "config.json",
        tokenizer=folder,
        generation_config=folder / "generation_config.json",
    )


def test_index_names_the_shards(folder: Path, write_json: Callable[[Path, Any], Path]) -> None:
    (folder / "consolidated.safetensors").touch()
    shards = [folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    write_json(
        folder / "model.safetensors.index.json",
        {"weight_map": {"b": shards[1].name, "a": shards[0].name, "c": shards[1].name}},
    )
    shards[0].touch()
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files .*model-00002-of-00002"):
        locate(str(folder))
    shards[1].touch()
    assert locate(str(folder)).safetensors == tuple(shards)


def test_shards_may_be_links_and_lie_in_folders(folder: Path, write_json: Callable[[Path, Any], Path]) -> None:
    """As in the hub's cache, whose snapshots are links to `../../blobs`."""
    blob = folder.parent / "blob"
    blob.touch()
    (folder / "part").mkdir()
    (folder / "a..b.safetensors").symlink_to(Path("..") / "blob")
    (folder / "part" / "c.safetensors").symlink_to(blob)
    names = {"a": "a..b.safetensors", "c": "part/c.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": names})
    assert locate(str(folder)).safetensors == tuple(folder / name for name in names.values())


@pytest.mark.parametrize("name", ["../b", "{root}/b", "part/../../b", "../My-Model/model.safetensors", ".."])
def test_an_index_that_names_files_elsewhere_is_refused(
    folder: Path, name: str, write_json: Callable[[Path, Any], Path]
) -> None:
    (folder.parent / "b").touch()
    (folder / "part").mkdir()
    name = name.format(root=folder.parent)
    names = {"a": "model.safetensors", "b": name}
    write_json(folder / "model.safetensors.index.json", {"weight_map": names})
    with pytest.raises(ModelError, match=r"index\.json names .*b?', a file outside of its folder"):
        locate(str(folder))


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_no_file_can_have(folder: Path, name: str, write_json: Callable[[Path, Any], Path]) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": name}})
    with pytest.raises(ModelError, match="lacks 1 of 1 weight files"):
        locate(str(folder))


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~no-such-user/model"])
def test_names_that_no_model_can_have(name: str) -> None:
    with pytest.raises(ModelError, match="Unknown model"):
        locate(name)


MAPS = ["{}", '{"a": 1, "b": "c"}', '{"a": []}']


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", "\xff", "[" * 100_000, *(f'{{"weight_map": {names}}}' for names in MAPS)],
    ids=lambda content: content[:40],
)
def test_damaged_index_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"index\.json .*fetch it again"):
        locate(str(folder))


def test_bare_configuration_is_enough_for_dummy_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = locate(str(tmp_path))
    assert files.safetensors == () and files.gguf is None and files.tokenizer is None


def test_gguf_by_file_and_by_folder(tmp_path: Path) -> None:
    path = tmp_path / "Model.Q8_0.gguf"
    path.touch()
    assert locate(str(path)) == ModelFiles("Model.Q8_0", tmp_path, gguf=path)
    (tmp_path / "mmproj-model.gguf").touch()
    assert locate(str(tmp_path)).gguf == path
    (tmp_path / "Other.gguf").touch()
    with pytest.raises(ModelError, match=r"holds 2 GGUF files \(Model\.Q8_0\.gguf, Other\.gguf\)"):
        locate(str(tmp_path))


def test_things_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        locate(str(tmp_path))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"weights\.bin is not a \.gguf file"):
        locate(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize(
    "name", ["smolm2", "./missing/model", "/missing/model.gguf", "missing/model.gguf", "a/b/c", "a" * 5000]
)
def test_unknown_model_says_what_was_tried(name: str) -> None:
    with pytest.raises(
        ModelError,
        match=r"Unknown model .*no such file or folder.*\(SmolLM2-135M-Instruct, all-MiniLM-L6-v2, whisper-",
    ):
        locate(name)


def test_nearest_catalogue_name_is_proposed() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'SmolLM2-135M-Instruct'\?"):
        locate("SmolLM-135M-instruct")


def test_repository_is_fetched_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = locate("org/Some-Model", revision="v2")
    assert (files.name, files.folder) == ("Some-Model", folder)
    assert (asked["repository"], asked["revision"]) == ("org/Some-Model", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    assert "*.py" not in asked["allow_patterns"]
    find_files(ModelSettings(model_path="org/Some-Model", trust_remote_code=True))
    assert {"*.safetensors", "*.py"} <= {*asked["allow_patterns"]}


def test_the_load_format_chooses_between_layouts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("consolidated.safetensors", "params.json", "Q4.gguf"):
        (folder / name).touch()
    usual = locate(str(folder))
    assert (usual.safetensors, usual.gguf) == ((folder / "model.safetensors",), None)
    assert locate(str(folder), load_format="gguf").gguf == folder / "Q4.gguf"
    asked: list[str] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **options: asked.extend(options["ignore_patterns"]) or folder
    )
    for path in (str(folder), "org/Some-Model"):
        files = find_files(ModelSettings(model_path=path, load_format="mistral"))
        assert (files.config, files.safetensors) == (folder / "params.json", (folder / "consolidated.safetensors",))
    assert "model*.safetensors" in asked and "consolidated*" not in asked
    (folder / "params.json").unlink()
    with pytest.raises(ModelError, match=r"lacks params\.json .*; leave out --load-format mistral"):
        locate(str(folder), load_format="mistral")


def test_a_split_gguf_is_one_model(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"Q4-0000{number}-of-00002.gguf").touch()
    files = locate(str(tmp_path))
    assert files.gguf is not None
    assert [part.name for part in gguf_parts(files.gguf)] == ["Q4-00001-of-00002.gguf", "Q4-00002-of-00002.gguf"]


def test_a_repository_of_consolidated_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out at first, because most repositories hold the same weights under the usual names."""

    def snapshot(repository: str, **options: Any) -> str:
        (tmp_path / "params.json").write_text("{}")
        if "consolidated*" not in options["ignore_patterns"]:
            (tmp_path / "consolidated.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = locate("org/Some-Model")
    assert files.config == tmp_path / "params.json"
    assert files.safetensors == (tmp_path / "consolidated.safetensors",)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.LocalEntryNotFoundError("Cannot reach the hub.\nMore."), "Cannot reach the hub"),
        (ConnectionError("no route"), "no route"),
        (getattr(errors, "HTTPError", OSError)("read timed out"), "read timed out"),
        (errors.HFValidationError("bad name"), "bad name"),
    ],
)
def test_hub_errors_become_one_sentence(error: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=rf"Could not fetch 'org/name' .*: {text}\. .*SmolLM2-135M-Instruct"):
        locate("org/name")
