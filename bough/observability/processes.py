"""CPU seconds of all processes of a server, by what they do. Names are SGLang's: `tokenizer` are the HTTP processes."""

import contextlib

import psutil

from bough.core.child_environment import TITLE

COMPONENTS = {"server": "tokenizer"}  # where a role has another name


def cpu_seconds(main: int) -> dict[str, float]:
    """Of the main process and all below it. One without a title counts for the one that started it, as it does when it
    has ended; so no number ever falls."""
    seconds: dict[str, float] = {}
    component_of = {main: "tokenizer"}
    first = psutil.Process(main)
    for process in (first, *first.children(recursive=True)):  # parents stand before their children
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():  # it has just ended
            title = next(iter(process.cmdline()), "")
            component = component_of.get(process.pid) or component_of.get(process.ppid(), "tokenizer")
            if title.startswith(TITLE):
                role = title.removeprefix(TITLE).split()[0]  # without its ranks
                component = COMPONENTS.get(role, role)
            component_of[process.pid] = component
            user, system, ended_user, ended_system = process.cpu_times()[:4]
            seconds[component] = seconds.get(component, 0.0) + user + system + ended_user + ended_system
    return seconds
