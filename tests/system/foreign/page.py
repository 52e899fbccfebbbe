"""Uses the page as a person would, in Chromium, and says what it saw. With a folder it keeps a picture of each view."""

from __future__ import annotations

import argparse
import base64
import itertools
import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, sync_playwright

PATIENCE_MS = 60_000
# What a model might say to harm its reader; and Markdown as it should look.
BAIT = """# Title

<img src=x onerror="window.harmed=1"> [link](javascript:window.harmed=1)

```python
x = "<b>"
```
"""
GROWTH = """() => {
  window.sizes = new Set();
  new MutationObserver(() => {
    const busy = document.querySelector('.message.assistant[aria-busy=true] .markdown');
    if (busy?.textContent) window.sizes.add(busy.textContent.length);
  }).observe(document.querySelector('.log'), {subtree: true, childList: true, characterData: true});
}"""
AXE = """async () => (await axe.run()).violations.map(
  v => v.id + ': ' + v.nodes.map(n => n.target.join(' ')).join(', '))"""
CLOCK = """[...document.querySelectorAll('.figure')]
  .find(f => f.textContent.startsWith('Lookups')).querySelector('dd').textContent"""
RATE = """[...document.querySelectorAll('.figure')]
  .find(f => f.textContent.startsWith('Tokens/s'))?.querySelector('dd').textContent"""

# Points at one place after another, so that each frame draws the whole tree anew.
FRAMES = """async () => {
  const canvas = document.querySelector('canvas'), box = canvas.getBoundingClientRect(), began = performance.now();
  for (let frame = 0; frame < 60; frame++) {
    const [clientX, clientY] = [box.left + box.width * 0.05, box.top + (box.height * (frame % 30)) / 30];
    canvas.dispatchEvent(new MouseEvent('mousemove', {clientX, clientY, bubbles: true}));
    await new Promise(requestAnimationFrame);
  }
  return 60 / ((performance.now() - began) / 1000);
}"""
STREAMS = """([key, text, rids]) => {
  const headers = {authorization: 'Bearer ' + key, 'content-type': 'application/json'};
  const sampling_params = {max_new_tokens: 4000, ignore_eos: true};
  for (const rid of rids)
    fetch('/generate', {method: 'POST', headers, body: JSON.stringify({text, rid, sampling_params, stream: true})})
      .then(answer => answer.text()).catch(() => {});
}"""
# Of the first node, beside its number: how light it is.
SHADE = "Math.max(...document.querySelector('canvas').getContext('2d').getImageData(3, 8, 1, 1).data.slice(0, 3))"
SHARED = (
    """[...document.querySelectorAll('td')].map(cell => cell.textContent).find(text => text.startsWith('2: request'))"""
)
FOCUS = "document.activeElement.ariaLabel || document.activeElement.textContent"
# Views whose link one would have to look for, at this width.
OUT_OF_SIGHT = """[...document.querySelectorAll('nav a')]
  .filter(link => link.getBoundingClientRect().right > link.parentElement.getBoundingClientRect().right)
  .map(link => link.textContent)"""
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
MANY = 5000  # nodes


def many_nodes() -> dict[str, Any]:
    """A tree as the server's stream shows it: below each of the first nodes nine others, in turn."""
    columns = {"tokens": 40, "created": 1, "locks": 0}
    figures: dict[str, Any] = {name: [value] * MANY for name, value in columns.items()}
    figures |= {"parent": [(node - 1) // 9 if node else -1 for node in range(MANY)]}
    figures |= {"used": list(range(MANY)), "hits": [node % 7 for node in range(MANY)]}
    return {
        **figures,
        "readers": [],
        "nodes": 28_000,
        "clock": MANY,
        "cached_tokens": 40 * MANY,
        "used_tokens": 0,
        "total_tokens": 80 * MANY,
    }


class Visit:
    def __init__(self, page: Page, given: argparse.Namespace) -> None:
        self.page, self.given = page, given
        self.seen: dict[str, Any] = {"violations": {}, "errors": [], "hosts": [], "too_wide": [], "out_of_sight": []}
        self.bearer = {"authorization": f"Bearer {given.api_key}"}
        self.manager = {"authorization": f"Bearer {given.admin_key}"}
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.seen["errors"].append(str(error)))
        page.on("request", lambda request: self.seen["hosts"].append(request.url.split("/")[2]))

    def give_key(self, field: str, key: str) -> None:
        """In the dialog, which the page has opened by itself."""
        self.page.locator(f"dialog input[name={field}]").fill(key)
        self.page.get_by_role("button", name="Use", exact=True).click()
        self.page.locator("dialog").wait_for(state="detached")

    def press(self, name: str) -> None:
        """Until what it changes is drawn, which the page does with the next frame."""
        self.page.get_by_role("button", name=name).click()
        self.page.evaluate(DRAWN)

    def say(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def answered(self, number: int) -> str:
        """The figures below the answer with this number, once it is complete."""
        return self.page.locator(".message.assistant").nth(number).locator(".stats").inner_text()

    def look(self, name: str, *, picture: bool = True) -> None:
        """Accessibility, width on a phone, and a picture."""
        if self.given.axe:
            self.page.evaluate(Path(self.given.axe).read_text())
            for scheme in ("dark", "light"):
                self.page.emulate_media(color_scheme=scheme)
                self.seen["violations"][f"{name}, {scheme}"] = self.page.evaluate(AXE)
        if self.given.screenshots and picture:
            self.page.screenshot(path=Path(self.given.screenshots) / f"ui-{name}.png")
        size = self.page.viewport_size
        self.page.set_viewport_size({"width": 360, "height": 740})
        if self.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            self.seen["too_wide"].append(name)
        self.seen["out_of_sight"] += [f"{name}: {link}" for link in self.page.evaluate(OUT_OF_SIGHT)]
        self.page.set_viewport_size(size)

    def chat(self) -> None:
        page, seen = self.page, self.seen
        page.goto(f"{self.given.url}/ui")
        page.locator("dialog").wait_for()
        page.wait_for_function(PAINTED)
        seen["first_paint_ms"] = page.evaluate(PAINTED)
        seen["asked_for_key"] = page.locator("dialog h2").inner_text()
        page.locator("dialog input[name=api]").fill("no-key-of-this-server")
        page.get_by_role("button", name="Use", exact=True).click()
        seen["wrong_key"] = page.locator("dialog .error").inner_text()
        self.give_key("api", self.given.api_key)
        page.get_by_label("Max tokens").fill("40")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("System prompt").fill("You are a gardener who answers with a list in Markdown.")
        page.evaluate(GROWTH)
        self.say("Which trees grow in wet soil?")
        seen["first_stats"] = self.answered(0)
        seen["sizes_while_streaming"] = page.evaluate("window.sizes.size")
        self.say("And which of them by the sea?")
        seen["second_stats"] = self.answered(1)

        page.get_by_role("button", name="Edit").nth(1).click()
        page.get_by_label("Edited message").fill("And which of them in the mountains?")
        self.press("Send as a branch")
        page.get_by_text("branch 2 of 2").wait_for()
        seen["branch_stats"] = self.answered(1)
        seen["branch_shown"] = page.locator(".message.user").nth(1).inner_text()
        self.look("chat")
        self.press("Previous branch")
        seen["other_branch"] = page.locator(".message.user").nth(1).inner_text()

        page.get_by_label("Max tokens").fill("4000")
        page.get_by_label("Temperature").fill("1")
        self.say("Write a very long story.")
        page.locator(".message.assistant[aria-busy=true] .markdown p").first.wait_for()
        page.get_by_role("button", name="Stop").click()
        seen["stopped"] = page.locator(".message.assistant .error").inner_text()

        page.get_by_label("Top p").fill("7")
        self.say("Is that allowed?")
        seen["refused"] = page.locator(".message.assistant .error").nth(1).inner_text()
        page.get_by_label("Top p").fill("")
        page.get_by_label("JSON schema").fill("{")
        self.say("JSON, please.")
        seen["bad_schema"] = page.locator(".message.assistant .error").last.inner_text()
        page.get_by_label("Max tokens").fill("60")
        page.get_by_label("Temperature").fill("0")  # so that no call is cut off
        schema = {"type": "object", "properties": {"tree": {"enum": ["oak", "elm"]}}, "required": ["tree"]}
        page.get_by_label("JSON schema").fill(json.dumps(schema))
        self.press("New chat")
        self.say("Name a tree.")
        self.answered(0)
        seen["structured"] = page.locator(".message.assistant .markdown").inner_text()
        page.get_by_label("JSON schema").fill("")

        chunk = {"choices": [{"delta": {"content": BAIT}, "finish_reason": "stop"}]}

        def harm(route: Route) -> None:
            route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

        page.route("**/v1/chat/completions", harm)
        self.press("New chat")
        self.say("Harm me.")
        page.locator(".markdown pre").wait_for()
        seen["harmed"] = page.evaluate("window.harmed ?? null")
        seen["elements"] = page.evaluate("[...document.querySelectorAll('.markdown *')].map(e => e.tagName)")
        seen["code"] = page.locator(".markdown pre").inner_text()
        page.unroute("**/v1/chat/completions")

    def keyboard(self) -> None:
        """Where the focus is after each key: never back at the top of the page."""
        page = self.page
        focused = self.seen["focused"] = []

        def then(*keys: str) -> None:
            for key in keys:
                page.keyboard.press(key)
                page.evaluate(DRAWN)
            focused.append(page.evaluate(FOCUS))

        self.press("New chat")
        enough = page.get_by_label("Max tokens").input_value()
        page.get_by_label("Max tokens").fill("8")
        self.say("Name a tree")
        self.answered(0)
        page.get_by_role("button", name="Edit").focus()
        then("Enter")
        then("Escape")
        then("Enter")
        page.keyboard.type(" of the north")
        then("Tab", "Enter")  # "Send as a branch"
        self.answered(0)
        self.seen["edited_by_keys"] = page.locator(".message.user .plain").inner_text()
        page.get_by_role("button", name="Previous branch").focus()
        then("Enter")
        then("Enter")  # there is none before it
        page.get_by_role("button", name="Regenerate").focus()
        then("Enter")
        page.locator(".message.assistant .hint", has_text="branch 2 of 2").wait_for()
        self.answered(0)
        focused.append(page.evaluate(FOCUS))
        page.get_by_role("button", name="Keys").focus()
        then("Enter", "Escape")
        page.locator("dialog").wait_for(state="detached")
        then("Enter", "Enter")  # the first field's key is taken as it is
        page.locator("dialog").wait_for(state="detached")
        focused.append(page.evaluate(FOCUS))
        page.get_by_label("Max tokens").fill(enough)

    def tools(self) -> None:
        page, seen = self.page, self.seen
        self.press("New chat")
        parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bern"]}}, "required": ["city"]}
        page.get_by_label("Tools (JSON)").fill(json.dumps([{"name": "weather", "parameters": parameters}]))
        page.get_by_label("Tool choice").select_option("required")
        self.say("What is the weather in Oslo?")
        seen["call_stats"] = self.answered(0)
        seen["call"] = page.locator(".call").inner_text()
        page.get_by_label("Tool choice").select_option("none")
        page.get_by_label("Result of weather").fill("It snows.")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Send result").click()
        seen["after_call"] = sent.value.post_data_json["messages"]
        seen["result_stats"] = self.answered(1)
        page.get_by_label("Tools (JSON)").fill("")

    def compare(self) -> None:
        page, seen = self.page, self.seen
        self.press("New chat")
        self.press("Compare two")
        page.get_by_role("form", name="Settings of A").get_by_label("Max tokens").fill("5")
        page.get_by_role("form", name="Settings of B").get_by_label("Max tokens").fill("9")
        self.say("Name three trees.")
        logs = [page.get_by_role("log", name=f"Messages of {name}") for name in "AB"]
        seen["compared"] = [log.locator(".stats").inner_text() for log in logs]
        self.look("compare")
        self.press("Close comparison")
        seen["sides_left"] = page.get_by_role("log").count()

    def timelines(self) -> None:
        page, seen = self.page, self.seen
        page.get_by_label("Max tokens").fill("30")
        page.get_by_label("Temperature").fill("0")
        self.say("Which trees keep their leaves in winter?")
        self.answered(1)
        page.get_by_role("link", name="Timeline", exact=True).last.click()
        stages = page.get_by_role("region", name="Stages of the request")
        page.get_by_text("detokenise", exact=True).first.wait_for()
        seen["stages"] = stages.locator("tbody th").all_inner_texts()
        seen["timeline_of"] = page.locator(".timelines h2").first.inner_text()
        page.get_by_role("application").focus()
        page.keyboard.press("End")
        seen["step"] = page.locator(".step").inner_text()
        self.look("timelines")
        page.get_by_role("button", name="All requests").click()
        page.locator(".requests li").first.wait_for()
        seen["requests"] = page.locator(".requests li").count()
        page.goto(f"{self.given.url}/ui#timelines/unknown")
        seen["not_kept"] = page.locator(".timelines .hint").first.inner_text()
        for broken in ("timelines/%", "constructor"):
            page.goto(f"{self.given.url}/ui#{broken}")
            page.reload()  # the address is read anew
            page.locator(".chat").wait_for()

    def routes(self) -> None:
        self.page.goto(f"{self.given.url}/docs")
        recordings = self.page.locator("details", has_text="/v1/audio/transcriptions")
        recordings.locator("summary").click()
        self.seen["body_of_recordings"] = recordings.inner_text()
        self.look("docs", picture=False)

    def ask_engine(self, text: str) -> None:
        self.page.request.post(
            f"{self.given.url}/generate",
            headers=self.bearer,
            data={"text": text, "sampling_params": {"max_new_tokens": 8}},
        )

    def tree(self) -> None:
        page, seen = self.page, self.seen
        page.get_by_role("link", name="Tree").click()
        page.locator("canvas").wait_for()
        seen["clock_before"] = self.clock()
        for city in ("Paris", "Rome", "Oslo", "Bern", "Lima"):
            for what in ("rivers", "gardens", "bridges"):
                self.ask_engine(f"This is a sentence about the city of {city}, and it goes on to speak of its {what}: ")
        page.wait_for_function(f"() => Number({CLOCK}) > {seen['clock_before']} + 20")
        seen["clock_after"] = self.clock()
        page.locator("canvas").focus()
        page.keyboard.press("ArrowRight")
        seen["node"] = page.locator(".node").inner_text()
        text = page.get_by_label("Text (management key)")
        text.check()
        page.locator("dialog").wait_for()
        page.keyboard.press("Escape")
        page.locator("dialog").wait_for(state="detached")
        page.locator("canvas").focus()
        for key in ("ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
            page.wait_for_timeout(1000)  # text is asked for once a pointer rests
        seen["without_key"] = [page.locator("dialog").count(), page.locator("pre.text").inner_text()]
        text.uncheck()
        text.check()
        page.locator("dialog").wait_for()
        self.give_key("admin", self.given.admin_key)
        page.wait_for_function("() => !document.querySelector('pre.text')?.textContent.includes('admin key')")
        page.wait_for_function("() => document.querySelector('pre.text')?.textContent.length > 0")
        seen["text"] = page.locator("pre.text").inner_text()
        self.look("tree")
        seen["shades"] = []
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            for _ in range(3):
                page.evaluate(DRAWN)
            seen["shades"].append(page.evaluate(SHADE))
        page.get_by_role("button", name="Pause").click()
        held = self.clock()
        self.ask_engine("Something that nobody has said before.")
        page.wait_for_timeout(2500)  # a snapshot comes once a second
        seen["changed_while_paused"] = self.clock() != held
        steps = page.locator(".controls input[type=range]")
        steps.press("Home")
        page.locator(".controls label", has_text=" before").wait_for()
        seen["stepped_back"] = [held, self.clock()]
        steps.press("End")
        page.locator(".controls label", has_text="latest").wait_for()
        seen["stepped_forth"] = self.clock() == held

    def readers(self) -> None:
        """Two long requests with one prompt: the node that they share names both, and leads to their timelines."""
        page, seen, rids = self.page, self.seen, ["secret-one", "secret-two"]
        page.get_by_role("link", name="Timelines").click()
        page.get_by_role("link", name="Tree").click()
        page.locator("canvas").wait_for()
        page.evaluate(STREAMS, [self.given.api_key, "Some gardens have a wall, some have a hedge. " * 20, rids])
        page.wait_for_function(f"() => {SHARED}")
        page.locator("canvas").focus()
        for _ in range(100):  # roots, one below the other
            page.keyboard.press("ArrowDown")
            page.evaluate(DRAWN)
            seen["read_node"] = page.locator(".node").inner_text()
            if "2: request" in seen["read_node"]:
                break
        seen["readers_in_the_table"] = page.evaluate(SHARED)
        self.look("tree-readers")
        page.locator(".node a").first.click()
        seen["reader"] = page.locator("h2", has_text="Running request").inner_text()
        seen["rids_on_the_page"] = [rid for rid in rids if rid in page.content()]
        for rid in rids:  # else they would go on while frames are counted
            self.manage("/abort_request", {"rid": rid})

    def eviction(self) -> None:
        """Nodes that the engine has let go are gone from the picture."""
        page = self.page
        page.get_by_role("link", name="Tree").click()
        page.locator("canvas").wait_for()
        self.manage("/flush_cache?timeout=30", {})
        page.locator("canvas[aria-label^='Radix tree of 0 nodes']").wait_for()
        self.ask_engine("The first sentence after all others were forgotten: ")
        page.wait_for_function("() => !document.querySelector('canvas').ariaLabel.startsWith('Radix tree of 0 nodes')")
        self.seen["nodes_after_eviction"] = page.locator(".figure dd").first.inner_text()

    def large_tree(self) -> None:
        """The page alone: the engine shows fewer nodes."""
        page = self.page
        event = f"data: {json.dumps({'replicas': [many_nodes()]})}\n\n"
        page.route("**/ui/tree", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
        page.goto(f"{self.given.url}/ui#overview")
        page.get_by_role("link", name="Tree").click()
        page.locator(f"canvas[aria-label*='{MANY} nodes']").wait_for()
        self.seen["frames_per_second"] = page.evaluate(FRAMES)
        self.seen["node_of_many"] = page.locator(".node").inner_text()
        self.seen["nodes_of_many"] = page.locator(".figure dd").first.inner_text()
        page.unroute("**/ui/tree")

    def restart(self) -> None:
        """The server begins anew while the page is open: its tree's clock and the numbers of its steps, too."""
        page, seen = self.page, self.seen
        shown = [(900, 900), (5, 5), (6, 6)]  # clock, and when the node was used

        def tree(route: Route) -> None:
            clock, used = shown.pop(0) if len(shown) > 1 else shown[0]
            columns = {"parent": [-1], "tokens": [9], "created": [1], "used": [used], "hits": [1], "locks": [0]}
            figures = {"nodes": 1, "clock": clock, "cached_tokens": 9, "used_tokens": 0, "total_tokens": 99}
            event = f"data: {json.dumps({'replicas': [{**columns, **figures, 'readers': []}]})}\n\n"
            route.fulfill(body=event, content_type="text/event-stream")

        page.route("**/ui/tree", tree)
        page.goto(f"{self.given.url}/ui#overview")
        page.get_by_role("link", name="Tree").click()
        page.locator("canvas").wait_for()
        page.wait_for_function(f"() => {CLOCK} === '6'")
        page.locator("canvas").focus()
        page.keyboard.press("ArrowRight")
        seen["used_after_restart"] = page.locator(".node").inner_text()
        page.unroute("**/ui/tree")

        numbers, asked = [500, 0], 0  # of the steps that the first answers bring

        def timeline(route: Route) -> None:
            nonlocal asked
            now, asked = 100.0 + asked, asked + 1
            steps = [[numbers.pop(0), now - 0.6, *(now - 0.5,) * 5, None, 1, 0]] if numbers else []
            replica = {"now": now, "found": None, "steps": steps, "requests": []}
            route.fulfill(body=json.dumps({"replicas": [replica]}), content_type="application/json")

        page.route("**/ui/timeline*", timeline)
        page.get_by_role("link", name="Timelines").click()
        while asked < 4:
            page.wait_for_timeout(200)
        seen["steps_after_restart"] = page.locator(".timelines h2").last.inner_text()
        page.unroute("**/ui/timeline*")

        counts = itertools.chain([1000], itertools.count(10, 10))

        def metrics(route: Route) -> None:
            count = next(counts)
            route.fulfill(body=f"bough:generation_tokens_total {count}\n", content_type="text/plain")

        page.route("**/metrics", metrics)
        page.get_by_role("link", name="Overview").click()
        page.wait_for_function(f"() => !['–', undefined].includes({RATE})")
        seen["rate_after_restart"] = page.evaluate(RATE)
        page.unroute("**/metrics")

    def manage(self, path: str, body: dict[str, Any], url: str | None = None) -> None:
        answer = self.page.request.post(f"{url or self.given.url}{path}", headers=self.manager, data=body)
        assert answer.ok, answer.text()

    def clock(self) -> int:
        return int(self.page.evaluate(CLOCK))

    def overview(self) -> None:
        self.page.get_by_role("link", name="Overview").click()
        self.page.locator(".chart").first.wait_for()
        load = [f"load-{number}" for number in range(4)]
        self.page.evaluate(STREAMS, [self.given.api_key, "Some gardens have a wall.", load])
        for number in range(4):
            self.ask_engine(f"Count from {number}: ")
            self.page.wait_for_timeout(1500)  # metrics are read every two seconds
        self.seen["figures"] = self.page.locator(".figures").inner_text()
        self.seen["charts"] = self.page.locator(".chart").all_inner_texts()
        self.look("overview")
        for rid in load:
            self.manage("/abort_request", {"rid": rid})

    def gateway(self) -> None:
        page = self.page
        page.goto(f"{self.given.gateway}/ui#gateway")
        page.locator("dialog input[name=api]").fill(self.given.api_key)
        self.give_key("admin", self.given.admin_key)
        page.locator("tbody tr").first.wait_for()
        page.get_by_role("link", name="Chat").click()
        page.get_by_label("Max tokens").fill("8")
        page.get_by_label("System prompt").fill("You are a gardener who answers in one short sentence. " * 20)
        self.say("Say hello.")
        self.seen["gateway_stats"] = self.answered(0)
        self.say("Say it again.")
        self.seen["gateway_answer"] = self.answered(1)
        self.timeline_of_an_answer()
        page.get_by_role("link", name="Gateway").click()
        page.locator("tbody tr").first.wait_for()
        page.wait_for_timeout(2500)  # metrics are read every two seconds
        self.seen["workers"] = page.get_by_role("region", name="Table of workers").locator("tbody").inner_text()
        self.seen["routed"] = page.get_by_role("region", name="Routing decisions").locator("tbody").inner_text()
        self.look("gateway")
        page.get_by_role("link", name="Timelines").click()
        page.locator(".requests li").first.wait_for()
        page.get_by_role("link", name="Tree").click()
        picker = page.get_by_role("combobox", name="Worker")
        self.seen["watched"] = picker.locator("option").all_inner_texts()
        picker.select_option(index=1)
        page.locator("canvas").wait_for()
        clock = self.clock()
        self.ask_engine("Is a gateway's picture of a worker's tree live?")
        page.wait_for_function(f"() => Number({CLOCK}) > {clock}")
        self.look("gateway-tree")
        self.seen["text_without_right"] = self.text_of_a_node()

    def timeline_of_an_answer(self) -> None:
        """On the gateway's page, of the worker that has it."""
        page, seen = self.page, self.seen
        links = page.get_by_role("link", name="Timeline", exact=True)
        links.nth(1).wait_for()
        links.nth(1).click()
        page.get_by_text("detokenise", exact=True).first.wait_for()
        stages = page.get_by_role("region", name="Stages of the request")
        seen["gateway_stages"] = stages.locator("th").all_inner_texts()
        seen["gateway_timeline"] = page.locator(".timelines h2").first.inner_text()
        picker = page.get_by_role("combobox", name="Worker")
        chosen = "e => e.selectedOptions[0].textContent"
        seen["worker_of_timeline"] = picker.evaluate(chosen)
        other = next(url for url in picker.locator("option").all_inner_texts() if url != seen["worker_of_timeline"])
        picker.select_option(label=other)
        page.locator("h2", has_text="Recent requests").wait_for()
        seen["after_the_other_worker"] = [page.evaluate("location.hash"), picker.evaluate(chosen) == other]

    def text_of_a_node(self) -> str:
        page = self.page
        page.get_by_label("Text (management key)").check()
        page.locator("canvas").focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("() => document.querySelector('pre.text')?.textContent.length > 0")
        return page.locator("pre.text").inner_text()

    def texts_of_a_worker(self) -> None:
        """Of one that takes the gateway's key for management, too."""
        page = self.page
        page.get_by_role("link", name="Tree").click()
        page.get_by_role("combobox", name="Worker").select_option(label=self.given.images)
        page.locator("canvas").wait_for()
        self.seen["text_of_worker"] = self.text_of_a_node()

    def worker_of_another_kind(self) -> None:
        """It has no timelines and no tree: no link, and no error."""
        page, seen = self.page, self.seen
        self.manage("/workers", {"url": self.given.stranger}, self.given.gateway)
        models = f"{self.given.gateway}/v1/models"
        while len(page.request.get(models, headers=self.bearer).json()["data"]) < 3:
            page.wait_for_timeout(200)
        page.goto(f"{self.given.gateway}/ui#chat")
        page.reload()
        page.get_by_label("Model").select_option("stranger")
        with page.expect_response(lambda answer: "/ui/timeline/" in answer.url and answer.status == 404):
            self.say("Who are you?")
        seen["stranger_stats"] = self.answered(0)
        page.wait_for_load_state("networkidle")  # the other workers do not have it, either
        page.evaluate(DRAWN)
        seen["links_of_stranger"] = page.get_by_role("link", name="Timeline", exact=True).count()
        seen["hints_of_stranger"] = []
        for view in ("Timelines", "Tree"):
            page.get_by_role("link", name=view).click()
            page.get_by_role("combobox", name="Worker").select_option(label=self.given.stranger)
            seen["hints_of_stranger"].append(page.locator(".hint", has_text="not a Bough server").inner_text())
        seen["errors_of_stranger"] = page.locator(".error").count()

    def two_models(self) -> None:
        """A worker with another model joins: both answer side by side, and the one that takes images is shown one."""
        page, seen = self.page, self.seen
        worker = {"url": self.given.images, "api_key": self.given.api_key}
        self.manage("/workers", worker, self.given.gateway)
        models = f"{self.given.gateway}/v1/models"
        while len(names := page.request.get(models, headers=self.bearer).json()["data"]) < 2:
            page.wait_for_timeout(200)
        sees, reads = sorted((model["id"] for model in names), key=lambda name: name != "sees-images")
        page.goto(f"{self.given.gateway}/ui#chat")
        page.reload()
        page.get_by_label("System prompt").fill("")
        self.press("Compare two")
        for side, model in (("A", sees), ("B", reads)):
            page.get_by_role("form", name=f"Settings of {side}").get_by_label("Model").select_option(model)
        seen["images_for_both"] = page.locator("input[type=file]").count()
        self.say("Name three trees.")
        for name in "AB":
            page.get_by_role("log", name=f"Messages of {name}").locator(".stats").wait_for()
        seen["heads"] = page.get_by_role("log").locator("h2").all_inner_texts()
        self.press("Close comparison")
        page.locator("input[type=file]").wait_for(state="attached")
        png = base64.b64decode(page.evaluate("document.createElement('canvas').toDataURL()").partition(",")[2])
        page.locator("input[type=file]").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": png})
        page.get_by_role("button", name="Remove image 1").wait_for()
        with page.expect_request("**/v1/chat/completions") as sent:
            self.say("What is on it?")
        seen["shown_to"] = sent.value.post_data_json["model"]
        seen["image_parts"] = [part["type"] for part in sent.value.post_data_json["messages"][-1]["content"]]
        seen["image_stats"] = self.answered(1)
        seen["image_width"] = page.locator(".message.user img").evaluate("image => image.naturalWidth")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    workers = ("--gateway", "--images", "--stranger")
    for flag in ("--chromium", *workers, "--api-key", "--admin-key", "--axe", "--screenshots"):
        parser.add_argument(flag)
    given = parser.parse_args()
    with sync_playwright() as playwright:
        # Containers' users may have no namespaces of their own, which Chromium's sandbox is made of.
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        visit = Visit(browser.new_page(viewport={"width": 1100, "height": 700}), given)
        for view in (
            visit.chat,
            visit.keyboard,
            visit.tools,
            visit.compare,
            visit.timelines,
            visit.tree,
            visit.readers,
            visit.eviction,
            visit.large_tree,
            visit.restart,
            visit.overview,
            visit.routes,
            visit.gateway,
            visit.two_models,
            visit.texts_of_a_worker,
            visit.worker_of_another_kind,
        ):
            view()
        browser.close()
    visit.seen["hosts"] = sorted(set(visit.seen["hosts"]))
    print(json.dumps(visit.seen))


if __name__ == "__main__":
    main()
