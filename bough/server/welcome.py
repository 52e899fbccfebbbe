"""The lines that a server prints when it is ready: where it is, what it serves, and a first call to paste."""

from __future__ import annotations

import shlex

from bough.core.settings import ServerSettings

EXAMPLE = '{"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}'


def welcome_text(model: str, url: str, settings: ServerSettings, seconds: float) -> str:
    return f"{model} is served at {url} (ready after {seconds:.1f} s). Try:\n  {curl_text(url, settings)}"


def curl_text(url: str, settings: ServerSettings) -> str:
    """A command for this very server. A key is never shown: it is taken from the environment, with a place to put it.
    A certificate is most often the server's own, which curl does not know."""
    words = ["curl"] if settings.ssl_certfile is None else ["curl", "-k"]
    if settings.uds is not None:
        words += ["--unix-socket", shlex.quote(settings.uds)]
        url = "https://localhost" if settings.ssl_certfile else "http://localhost"
    words.append(f"'{url}/generate'" if "[" in url else f"{url}/generate")
    if settings.api_key is not None:
        words += ["-H", '"Authorization: Bearer ${BOUGH_API_KEY:-YOUR_KEY}"']
    return " ".join([*words, "-H", "'Content-Type: application/json'", "-d", f"'{EXAMPLE}'"])
