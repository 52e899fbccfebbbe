"""Finding and assembling a tokenizer from a model's files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from bough.core.errors import ModelError, RequestError, SettingsError
from bough.tokenizer.incremental import BYTE_OF_CHAR
from bough.tokenizer.load import load_tokenizer
from bough.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a byte tokenizer: ids are places in GPT-2's alphabet, then <s>, </s> and <tool>."""
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(BYTE_OF_CHAR)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tool>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def configure(folder: Path, **more: Any) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", {**config, **more})


def test_a_folder_gives_ids_specials_and_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (256, (257,), 259)
    assert tokenizer.special_ids == {256, 257}
    ids = tokenizer.encode("é<tool></s>")
    assert ids[2:] == [258, 257]
    assert tokenizer.decode(ids) == "é<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "é<tool></s>"
    assert tokenizer.encode_batch(["a", "ab"]) == [tokenizer.encode("a"), tokenizer.encode("ab")]


def test_a_token_as_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    first_byte, _ = tokenizer.encode("é")
    assert tokenizer.token_text(first_byte) == "\ufffd"
    assert tokenizer.token_text(257) == "</s>"
    assert tokenizer.token_text(10_000) == tokenizer.token_text(-1) == tokenizer.token_text(2**40) == ""


def test_a_sentencepiece_token_keeps_its_space(spm: Tokenizer) -> None:
    assert [spm.token_text(token) for token in spm.encode("the")] == ["<s>", " the"]


def test_bos_is_added_where_only_the_configuration_asks(folder: Path) -> None:
    configure(folder, add_bos_token=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a")[0] == 256
    assert len(tokenizer.encode("a")) == 2
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_tokens_named_special_are_special(folder: Path) -> None:
    write(folder, "special_tokens_map.json", {"pad_token": "<tool>", "unk_token": "<not in the vocabulary>"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.vocab_size == 259


def test_tokens_that_only_the_configuration_knows_are_added(folder: Path) -> None:
    write(folder, "added_tokens.json", {"<a>": 259})
    configure(folder, added_tokens_decoder={"260": {"content": "<b>", "special": True}, "256": {"content": "<s>"}})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<a><b>") == [259, 260]
    assert tokenizer.special_ids == {256, 257, 260}


def test_added_tokens_that_do_not_fit_are_refused(folder: Path) -> None:
    write(folder, "added_tokens.json", {"<a>": 300})
    with pytest.raises(ModelError, match="'<a>' should have id 300"):
        load_tokenizer(folder)


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff"])
def test_a_lone_surrogate_is_the_requests_error(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode_batch(["good", text])


def prompt(tokenizer: Tokenizer) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_templates_come_from_the_most_specific_place(folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(folder).chat_template is None
    configure(folder, chat_template=[{"name": "default", "template": "list {{ bos_token }}"}])
    assert prompt(load_tokenizer(folder)) == "list <s>"
    configure(folder, chat_template="string {{ eos_token }}")
    assert prompt(load_tokenizer(folder)) == "string </s>"
    write(folder, "processor_config.json", {"chat_template": "processor"})
    assert prompt(load_tokenizer(folder)) == "processor"
    write(folder, "chat_template.json", {"chat_template": "json"})
    assert prompt(load_tokenizer(folder)) == "json"
    write(folder, "chat_template.jinja", "file")
    assert prompt(load_tokenizer(folder)) == "file"
    assert prompt(load_tokenizer(folder, chat_template="{{ 'inline' }}")) == "inline"
    write(tmp_path, "mine.jinja", "mine")
    assert prompt(load_tokenizer(folder, chat_template=str(tmp_path / "mine.jinja"))) == "mine"


@pytest.mark.parametrize(
    ("config", "kind", "place"),
    [
        ({"image_token_index": 258}, "image", "<tool>"),
        ({"video_token_id": 258, "vision_start_token_id": 256, "vision_end_token_id": 257}, "video", "<s><tool></s>"),
        ({"image_token_id": 258, "image_start_token_id": 256, "image_end_token_id": 257}, "image", "<s><tool></s>"),
        ({"audio_token_id": 258, "vision_start_token_id": 256, "vision_end_token_id": 257}, "audio", "<tool>"),
        ({"model_type": "gemma3", "boi_token_index": 256, "image_token_index": 258}, "image", "<s>"),
        ({"image_token_id": None}, "image", None),
    ],
)
def test_the_configuration_names_the_places_of_media(
    folder: Path, config: dict[str, Any], kind: Any, place: str | None
) -> None:
    write(folder, "config.json", config)
    template = load_tokenizer(folder, chat_template="{{ messages[0].content }}").chat_template
    assert template is not None and template.place_of(kind) == place


def test_without_a_template_the_error_says_how_to_give_one(folder: Path) -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        prompt(load_tokenizer(folder))


@pytest.mark.parametrize(
    ("given", "reason"),
    [("no/such/file", "No such file"), ("x" * 5000, "too long"), ("a\0b", "null"), ("a\n{% if %}", "line 2")],
)
def test_a_bad_chat_template_flag_is_found_at_the_start(folder: Path, given: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        load_tokenizer(folder, chat_template=given)


def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(tmp_path_factory.mktemp("empty"))
    write(folder, "tokenizer_config.json", "{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(folder)


def test_an_old_folder_is_converted_by_transformers(folder: Path) -> None:
    alphabet = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    write(folder, "config.json", {"model_type": "gpt2"})
    write(folder, "vocab.json", {**alphabet, "Ġa": 256, "<|end|>": 257})
    write(folder, "merges.txt", "#version: 0.2\nĠ a\n")
    end = "<|end|>"
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": end, "eos_token": end, "unk_token": end}
    write(folder, "tokenizer_config.json", {**config, "chat_template": "chat {{ eos_token }}"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(" aé<|end|>") == [256, alphabet["Ã"], alphabet["©"], 257]
    assert tokenizer.eos_ids == (257,)
    assert prompt(tokenizer) == "chat <|end|>"


def test_nothing_heavy_is_imported_to_load_a_folder(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from bough.tokenizer.load import load_tokenizer\n"
        f"load_tokenizer(Path({str(folder)!r})).encode('x')\n"
        "print([name for name in ('torch', 'transformers', 'jinja2') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A folder that transformers must convert."""
    write(tmp_path, "vocab.json", {"a": 0, "b": 1})
    write(tmp_path, "merges.txt", "#version: 0.2\n")
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    assert load_tokenizer(tmp_path).encode("ab") == [0, 1]
    return tmp_path


OWN_CODE = """
from transformers import PreTrainedTokenizer
from pathlib import Path
Path({trace!r}).touch()

class Own(PreTrainedTokenizer):
    "Ids are the bytes of UTF-8; then come <s> and <tool>, and </s> is byte 0."
    def __init__(self, vocab_file=None, **kwargs):
        super().__init__(**kwargs)
    @property
    def vocab_size(self):
        return 256
    def get_vocab(self):
        return {{chr(i): i for i in range(256)}} | self.added_tokens_encoder
    def _tokenize(self, text):
        return [chr(byte) for byte in text.encode()]
    def _convert_token_to_id(self, token):
        return ord(token)
    def _convert_id_to_token(self, token):
        return chr(token)
    def convert_tokens_to_string(self, tokens):
        return bytes(map(ord, "".join(tokens))).decode(errors="replace")
    def build_inputs_with_special_tokens(self, ids, more=None):
        return [self.bos_token_id, *ids]
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose tokenizer and configuration are classes in files of its own, which leave traces."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("builtins.input", lambda question: "y")  # a terminal, or somebody's `yes`
    write(tmp_path, "own.py", OWN_CODE.format(trace=str(tmp_path / "tokenizer_ran")))
    write(tmp_path, "shape.py", f"open({str(tmp_path / 'config_ran')!r}, 'w').close()\nclass Shape: ...\n")
    write(tmp_path, "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "shape.Shape"}})
    config = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["own.Own", None]},
        "chat_template": "{{ bos_token }}x",
    }
    added = {"256": {"content": "<s>", "special": True}, "257": {"content": "<tool>", "special": False}}
    write(tmp_path, "tokenizer_config.json", {**config, "bos_token": "<s>", "added_tokens_decoder": added})
    return tmp_path


def traces(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*_ran"))


def test_code_of_a_folder_is_not_run_without_the_flag(with_code: Path) -> None:
    with pytest.raises(ModelError, match=r"own\.Own.*--trust-remote-code"):
        load_tokenizer(with_code)
    write(with_code, "vocab.json", {"a": 0})  # nor where the library might have a reader
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_tokenizer(with_code)
    assert traces(with_code) == []


def test_code_of_a_folder_is_not_run_where_it_is_not_needed(with_code: Path, folder: Path) -> None:
    assert folder == with_code
    configure(folder, auto_map={"AutoTokenizer": ["own.Own", None]})
    assert load_tokenizer(folder, trust_remote_code=True).encode("a") == [ord("a") - 0x21]
    assert traces(with_code) == []


def test_code_of_a_folder_reads_its_tokenizer_with_the_flag(with_code: Path) -> None:
    tokenizer = load_tokenizer(with_code, trust_remote_code=True)
    assert traces(with_code) == ["tokenizer_ran"]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (256, (), 258)
    assert tokenizer.special_ids == {256}
    text = "日本<tool>é😀 x"
    ids = tokenizer.encode(text)
    assert ids == [256, *"日本".encode(), 257, *"é😀 x".encode()]
    assert tokenizer.encode_batch([text, "b"], add_special_tokens=False) == [ids[1:], [ord("b")]]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    decoder = tokenizer.decoder((), skip_special_tokens=True)
    shown = [decoder.push([token]) for token in ids]
    assert "".join(shown) + decoder.flush() == text
    assert "\ufffd" not in "".join(shown)
    assert tokenizer.token_text(257) == "<tool>"
    assert tokenizer.token_text(ids[1]) == "\ufffd"
    assert prompt(tokenizer) == "<s>x"
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize("name", ["vocab", "merges"])
def test_a_configuration_names_no_files_elsewhere(older: Path, name: str, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "vocab.json"
    elsewhere.write_text(json.dumps({"secret": 0, "b": 1}))
    configure(older, **{name: str(elsewhere)})
    with pytest.raises(ModelError, match=f"tokenizer_config.json names a file as its {name}"):
        load_tokenizer(older)


def test_what_upsets_the_converter_is_told(older: Path) -> None:
    configure(older, tokenizer_object="x")
    with pytest.raises(ModelError, match="its other tokenizer files cannot be read"):
        load_tokenizer(older)
