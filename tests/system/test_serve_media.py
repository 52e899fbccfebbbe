"""`bough serve` with tiny random LLaVA and Qwen2-VL checkpoints: pictures through every API give the tokens of
Transformers' `generate`, and what is wrong with a picture concerns its request alone."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
from PIL import Image

import bough
from tests.multimodal.checkpoints import SPECS, write_model
from tests.multimodal.test_multimodal_families import as_png, picture
from tests.parity.test_media_pipeline import as_wav
from tests.system.serving import Server, running

FAMILIES = ("llava", "qwen2_vl")
NEW, ASKED = 12, "What is on it?"
FLAGS = ("--dtype", "float32", "--max-total-tokens", "4096", "--cpu-threads", "1", "--device", "cpu")
TEMPLATE = (
    "{% for m in messages %}{{ m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else 'PLACE' }}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
)


def as_jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG")
    return file.getvalue()


PNG = as_png(picture(40, 60, 1))
JPEG = as_jpeg(picture(90, 33, 2))


@dataclass
class Served:
    family: str
    folder: Path
    server: Server
    processor: Any
    model: Any

    def prompt(self, count: int) -> str:
        return f"user\n{SPECS[self.family].place * count}{ASKED}\n"

    @torch.inference_mode()
    def truth(self, *images: bytes) -> tuple[list[int], list[int], str]:
        """Transformers' prompt, its answer, and that as text."""
        decoded = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        given = self.processor(text=self.prompt(len(images)), images=decoded, return_tensors="np")
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in given.items()}
        ids = tensors["input_ids"][0].tolist()
        output = self.model.generate(**tensors, max_new_tokens=NEW)[0, len(ids) :].tolist()
        return ids, output, self.processor.tokenizer.decode(output)

    def post(self, path: str, **body: Any) -> Any:
        reply = httpx.post(f"{self.server.url}{path}", json={"model": "any", **body}, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """Both start at the same time."""
    found: dict[str, Served] = {}
    with contextlib.ExitStack() as cleanup:
        for family in FAMILIES:
            folder = tmp_path_factory.mktemp(family)
            processor, model = write_model(folder, family)
            (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", SPECS[family].place))
            server = cleanup.enter_context(running(str(folder), *FLAGS, ready=False))
            found[family] = Served(family, folder, server, processor, model)
        for each in found.values():
            each.server.wait_ready()
        yield found


@pytest.fixture(params=FAMILIES)
def served(request: pytest.FixtureRequest, models: dict[str, Served]) -> Served:
    return models[request.param]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def base64_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


def shown(*images: bytes, text: str = ASKED) -> list[Any]:
    """A message of OpenAI's."""
    urls = [f"data:image/{'png' if image == PNG else 'jpeg'};base64,{base64_of(image)}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def ask(client: openai.OpenAI, *images: bytes, text: str = ASKED, **options: Any) -> Any:
    given = {"model": "any", "temperature": 0, "max_tokens": NEW, **options}
    return client.chat.completions.create(messages=shown(*images, text=text), **given)


@pytest.mark.slow
def test_openai(served: Served, client: openai.OpenAI) -> None:
    for images in [(PNG,), (JPEG,), (PNG, JPEG)]:
        ids, _, text = served.truth(*images)
        answer = ask(client, *images)
        assert answer.choices[0].message.content == text and answer.usage.prompt_tokens == len(ids)
    again = ask(client, PNG, JPEG)
    assert again.choices[0].message.content == text
    assert again.usage.prompt_tokens_details.cached_tokens == len(ids) - 1
    streamed = list(ask(client, PNG, JPEG, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    response = client.responses.create(
        model="any",
        temperature=0,
        max_output_tokens=NEW + 4,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": f"data:image/png;base64,{base64_of(PNG)}", "detail": "auto"},
                    {"type": "input_text", "text": ASKED},
                ],
            }
        ],
    )
    assert response.output_text.startswith(served.truth(PNG)[2])


@pytest.mark.slow
def test_anthropic_ollama_and_the_native_api(served: Served) -> None:
    ids, output, text = served.truth(JPEG)
    source = {"type": "base64", "media_type": "image/jpeg", "data": base64_of(JPEG)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW, "temperature": 0}
    assert served.post("/v1/messages", **asked)["content"][0]["text"] == text
    assert served.post("/v1/messages/count_tokens", messages=asked["messages"]) == {"input_tokens": len(ids)}
    message = {"role": "user", "content": ASKED, "images": [base64_of(JPEG)]}
    options = {"temperature": 0, "num_predict": NEW}
    answer = served.post("/api/chat", messages=[message], options=options, stream=False)
    assert answer["message"]["content"] == text
    sampling = {"temperature": 0, "max_new_tokens": NEW}
    wanted = {"return_prompt_token_ids": True, "return_logprob": True, "logprob_start_len": 0}
    both, expected = served.truth(PNG, JPEG), {1: (ids, output, text)}
    expected[2] = both
    batch = {
        "text": [served.prompt(1), served.prompt(2)],
        "image_data": [[base64_of(JPEG)], [*map(base64_of, (PNG, JPEG))]],
    }
    for count, found in enumerate(served.post("/generate", **batch, sampling_params=sampling, **wanted), 1):
        own, answered, _ = expected[count]
        assert found["output_ids"] == answered and found["meta_info"]["prompt_token_ids"] == own
        assert [token for _, token, *_ in found["meta_info"]["input_token_logprobs"]] == own
    # Ids that hold all tokens of the pictures already.
    whole = served.post(
        "/generate", input_ids=both[0], image_data=[*map(base64_of, (PNG, JPEG))], sampling_params=sampling
    )
    assert whole["output_ids"] == both[1]


@pytest.mark.slow
def test_what_is_wrong_with_pictures_disturbs_nobody(served: Served, client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "any", "temperature": 0, "prompt": "user\nTell me a story.\n", "max_tokens": 300}
    alone = client.completions.create(**given).choices[0].text
    wrong = {
        "cannot be decoded": [b"\xff\xd8\xff\xe0 no picture"],
        "cut short": [PNG[: len(PNG) // 2]],
        "65 images; at most 64": [PNG] * 65,
        "context length": [PNG] * 60,  # of 512 tokens, which the text alone leaves room in
        "max_tokens asks for 500 more": [PNG] * 30,
    }
    stream, pieces = iter(client.completions.create(**given, stream=True)), []
    for reason, images in wrong.items():
        pieces.append(next(stream).choices[0].text)
        with pytest.raises(openai.BadRequestError) as caught:
            text = ASKED * 30 if reason == "context length" else ASKED
            ask(client, *images, text=text, max_tokens=500 if "500" in reason else NEW)
        assert reason in caught.value.message and "KeyError" not in caught.value.message
    assert "".join([*pieces, *(chunk.choices[0].text for chunk in stream)]) == alone
    assert ask(client, PNG).choices[0].message.content == served.truth(PNG)[2]


@pytest.mark.slow
def test_the_engine_takes_pillows_images(models: dict[str, Served]) -> None:
    served = models["llava"]
    settings = {"dtype": "float32", "max_total_tokens": 4096, "cpu_threads": 1, "device": "cpu"}
    with bough.Engine(model_path=str(served.folder), **settings) as engine:
        image = Image.open(io.BytesIO(PNG))
        answer = engine.generate(served.prompt(1), {"temperature": 0, "max_new_tokens": NEW}, image_data=image)
    assert answer["output_ids"] == served.truth(PNG)[1]


@pytest.mark.slow
def test_recordings_through_openai_and_the_native_api(tmp_path: Path) -> None:
    processor, model = write_model(tmp_path, "qwen2_audio")  # without a template of its own
    samples = np.random.default_rng(0).normal(0, 0.1, 20000).astype(np.float32)
    given = base64_of(as_wav(samples))
    place = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    prompt = f"user\n{place}\n{ASKED}\n"
    inputs = processor(text=prompt, audio=[samples], sampling_rate=16000, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        expected = model.generate(**inputs, max_new_tokens=NEW)[0, length:].tolist()
    text = processor.tokenizer.decode(expected)
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role + '\\n' + m.content + '\\n' }}{% endfor %}")
    with running(str(tmp_path), *FLAGS, "--chat-template", str(template)) as server:
        served = Served("qwen2_audio", tmp_path, server, processor, model)
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        found = served.post("/generate", text=prompt, audio_data=given, sampling_params=sampling)
        assert found["text"] == text and found["meta_info"]["prompt_tokens"] == length
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            sound = {"type": "input_audio", "input_audio": {"data": given, "format": "wav"}}
            message: Any = {"role": "user", "content": [sound, {"type": "text", "text": ASKED}]}
            answer = client.chat.completions.create(
                model="any", messages=[message], temperature=0, max_tokens=NEW, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].message.content == text
            assert answer.usage.prompt_tokens == length
            picture_of = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(PNG)}"}}
            with pytest.raises(openai.BadRequestError, match="takes no image"):
                client.chat.completions.create(model="any", messages=[{"role": "user", "content": [picture_of]}])


class Gallery(http.server.BaseHTTPRequestHandler):
    """Shows its picture only once it is told to."""

    def do_GET(self) -> None:
        self.server.asked.set()  # type: ignore[attr-defined]
        self.server.opened.wait(60)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(PNG)))
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, *words: Any) -> None:
        """Nothing."""


def owner_of(client: httpx.Client, server: Server) -> int:
    """The process that has taken the client's connection."""
    reply = client.get(f"{server.url}/health")
    port = reply.extensions["network_stream"].get_extra_info("client_addr")[1]
    for process in (psutil.Process(server.process.pid), *server.children()):
        if any(each.raddr and each.raddr.port == port for each in process.net_connections("tcp")):
            return process.pid
    raise AssertionError("nobody has it")


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False], ids=["the same process", "another process"])
def test_an_abort_finds_a_request_whose_picture_is_on_its_way(tmp_path: Path, same: bool) -> None:
    write_model(tmp_path, "llava")
    with contextlib.ExitStack() as cleanup:
        gallery = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gallery)
        gallery.asked, gallery.opened = threading.Event(), threading.Event()  # type: ignore[attr-defined]
        cleanup.callback(gallery.server_close)
        threading.Thread(target=gallery.serve_forever, daemon=True).start()
        cleanup.callback(gallery.shutdown)
        flags = (*FLAGS, "--tokenizer-worker-num", "2", "--allowed-media-domains", "127.0.0.1")
        server = cleanup.enter_context(running(str(tmp_path), *flags))
        asking = cleanup.enter_context(httpx.Client(timeout=60))
        asked = owner_of(asking, server)
        for _ in range(200):
            aborting = cleanup.enter_context(httpx.Client(timeout=60))
            if (owner_of(aborting, server) == asked) == same:
                break
        else:
            pytest.fail("all connections went to one process")
        url = f"http://127.0.0.1:{gallery.server_port}/picture.png"
        body = {
            "text": SPECS["llava"].place + ASKED,
            "image_data": url,
            "rid": "job",
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
        }
        pool = cleanup.enter_context(ThreadPoolExecutor(1))
        cleanup.callback(gallery.opened.set)  # type: ignore[attr-defined]
        answer = pool.submit(asking.post, f"{server.url}/generate", json=body)
        assert gallery.asked.wait(60)  # type: ignore[attr-defined]
        assert aborting.post(f"{server.url}/abort_request", json={"rid": "job"}).status_code == 200
        gallery.opened.set()  # type: ignore[attr-defined]
        reply = answer.result()
        reason = reply.json()["meta_info"]["finish_reason"]
        assert (reason["type"], reason.get("err_type")) == ("abort", "AbortError")
        assert reply.json()["output_ids"] == []
        again = asking.post(f"{server.url}/generate", json=body)  # the id may be used again
        assert again.status_code == 200 and len(again.json()["output_ids"]) == NEW
