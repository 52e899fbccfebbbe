"""The gateway's configuration file: workers, policies, keys with their rates, and settings by name.

A wrong file changes nothing. A changed file is applied at once, except for settings that need a restart.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bough.core.custom_code import check_server_code
from bough.core.errors import SettingsError
from bough.core.files import read_yaml, user_path
from bough.core.gateway_settings import GatewaySettings, gateway_fields
from bough.core.setting_checks import check_value
from bough.gateway.clients import ClientKey, Clients
from bough.gateway.core import Gateway
from bough.gateway.policies import build_policy
from bough.gateway.policy_table import PolicyChoice, default_choice
from bough.gateway.registry import checked_key, normal_url

log = logging.getLogger(__name__)

LOOK_S = 0.5
SOURCE = "file"
RATES = ("rate_limit_rps", "rate_limit_burst")
SHAPES: dict[type, str] = {
    list: "a list; write one entry per line after `- `",
    dict: "a mapping from models to policies",
}
C = TypeVar("C", list[Any], dict[Any, Any])
CHANGEABLE = ("policy", *RATES)  # settings that a changed file changes


class FileWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class FileContent:
    """A valid file."""

    settings: dict[str, Any] = field(default_factory=dict)
    workers: tuple[FileWorker, ...] = ()
    policies: dict[str, PolicyChoice] = field(default_factory=dict)
    api_keys: tuple[ClientKey, ...] = ()


def read_file(file: str) -> FileContent:
    """Raises a `SettingsError` that names the place."""
    content = {str(name).replace("-", "_"): value for name, value in read_yaml(file).items()}
    known = {f.name: f for f in gateway_fields()}
    settings: dict[str, Any] = {}
    try:
        workers = tuple(_worker(entry) for name in ("workers", "worker_urls") for entry in _taken(content, name, list))
        policies = {str(model): _policy(entry) for model, entry in _taken(content, "policies", dict).items()}
        keys = tuple(_key(number, entry) for number, entry in enumerate(_taken(content, "api_keys", list), 1))
        selector = tuple(_taken(content, "selector", list))
        if not all(isinstance(label, str) for label in selector):
            raise SettingsError("selector must be a list of labels such as app=bough.")
        if selector:
            settings["selector"] = selector
        for name, value in content.items():
            if name not in known:
                raise SettingsError(f"there is no setting {name!r}; `bough gateway --help` lists them.")
            settings[name] = check_value(known[name], value)
        build_policy(settings.get("policy") or GatewaySettings().default_policy)
    except (SettingsError, msgspec.ValidationError) as error:
        raise SettingsError(f"{file}: {error}") from None
    return FileContent(settings, workers, policies, keys)


def _taken(content: dict[str, Any], name: str, kind: type[C]) -> C:
    given = content.pop(name, None)
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise SettingsError(f"{name} must be {SHAPES[kind]}, got {type(given).__name__}.")
    return given


def _worker(entry: Any) -> FileWorker:
    worker = FileWorker(entry) if isinstance(entry, str) else msgspec.convert(entry, FileWorker)
    return FileWorker(normal_url(worker.url), checked_key(worker.api_key))


def _policy(entry: Any) -> PolicyChoice:
    if isinstance(entry, str):
        choice = PolicyChoice(entry)
    elif isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
        choice = PolicyChoice(entry["name"], {str(key): value for key, value in entry.items() if key != "name"})
    else:
        raise SettingsError(f"a model's policy is a name, or a mapping with `name` and options; got {entry!r}.")
    build_policy(choice.name, **choice.options)
    return choice


def _key(number: int, entry: Any) -> ClientKey:
    given = ClientKey(entry) if isinstance(entry, str) else msgspec.convert(entry, ClientKey)
    if not given.key.strip():
        raise SettingsError("a key in api_keys is empty, which would guard nothing.")
    if given.rate_limit_rps is not None and not given.rate_limit_rps > 0:
        raise SettingsError("rate_limit_rps of a key must be above 0.")
    if given.rate_limit_burst is not None and not given.rate_limit_burst >= 1:
        raise SettingsError("rate_limit_burst of a key must be at least 1.")
    return msgspec.structs.replace(given, name=given.name or f"file key {number}")


class ConfigFile:
    def __init__(self, file: str, gateway: Gateway) -> None:
        self._path = user_path(file)
        self._gateway = gateway
        self._applied: FileContent | None = None
        self._seen: bytes | None = None
        self._rated = gateway.settings  # with the file's rates

    def apply(self) -> None:
        self._seen = _bytes(self._path)
        content = read_file(str(self._path))
        check_server_code(self._rated.engine, keyed=bool(self._rated.api_keys or content.api_keys))
        before = self._applied or FileContent(content.settings)  # the first file's settings hold since the start
        changed = {
            name
            for name in content.settings.keys() | before.settings.keys()
            if before.settings.get(name) != content.settings.get(name) and name not in self._gateway.settings.given
        }
        self._take_workers(content)
        self._take_policies(before, content, changed)
        self._take_clients(before, content, changed)
        for name in sorted(changed.difference(CHANGEABLE)):
            log.warning("%s of %s holds from the gateway's next start", name, self._path)
        self._applied = content

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if _bytes(self._path) == self._seen:
                continue
            try:
                self.apply()
            except SettingsError as error:
                log.error("the configuration stays as it was: %s", error)
            except Exception:  # not swallowed: a defect is logged with its traceback, and the next change is still seen
                log.exception("the configuration stays as it was: %s could not be read", self._path)
            else:
                log.info("the configuration of %s holds", self._path)

    def _take_workers(self, content: FileContent) -> None:
        registry = self._gateway.registry
        wanted = {worker.url: worker for worker in content.workers}
        for worker in registry:
            if worker.source == SOURCE and worker.url not in wanted:
                registry.remove(worker)
        for new in wanted.values():
            registry.add(new.url, new.api_key, SOURCE)

    def _take_policies(self, before: FileContent, content: FileContent, changed: set[str]) -> None:
        for model in before.policies.keys() - content.policies.keys():
            self._gateway.policies.forget(model)
        for model, choice in content.policies.items():
            if before.policies.get(model) != choice:
                self._gateway.policies.choose(model, choice)
        if "policy" in changed:
            settings = dataclasses.replace(self._gateway.settings, policy=content.settings.get("policy"))
            self._gateway.policies.set_default(default_choice(settings))

    def _take_clients(self, before: FileContent, content: FileContent, changed: set[str]) -> None:
        """Replaces the clients only if keys or rates have changed, because their rate limits start again."""
        rates: dict[str, Any] = {name: content.settings.get(name) for name in RATES if name in changed}
        if content.api_keys == before.api_keys and not rates:
            return
        self._rated = dataclasses.replace(self._rated, **rates)
        self._gateway.clients = Clients(self._rated, content.api_keys)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
