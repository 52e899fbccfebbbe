"""The page at `/docs`: reads `openapi.json` and shows it. Self-contained, so it works without any other server."""

from __future__ import annotations

DOCS_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Bough: routes</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  h2 { margin-top: 2rem; border-bottom: 1px solid #ddd; }
  details { border: 1px solid #ddd; border-radius: 6px; margin: .4rem 0; padding: .3rem .7rem; }
  summary { cursor: pointer; } summary code { font-weight: 600; }
  .method { display: inline-block; min-width: 4.5rem; font: 600 12px monospace; color: #2a6; }
  pre { background: #f6f6f4; padding: .6rem; overflow: auto; border-radius: 6px; font-size: 13px; }
  @media (prefers-color-scheme: dark) {
    body { background: #1b1b1b; color: #ddd; } pre { background: #262626; } details, h2 { border-color: #444; }
  }
</style></head><body>
<h1>Bough</h1><p>The routes of this server. <a href="openapi.json">openapi.json</a> is the same for programs.</p>
<main id="main">Loading …</main>
<script>
const make = (tag, text, parent) => {
  const element = document.createElement(tag);
  element.textContent = text;
  parent.append(element);
  return element;
};
function resolve(schema, all, seen) {
  if (Array.isArray(schema)) return schema.map(item => resolve(item, all, seen));
  if (schema === null || typeof schema !== "object") return schema;
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return seen.includes(name) ? "see " + name : resolve(all[name], all, [...seen, name]);
  }
  return Object.fromEntries(Object.entries(schema).map(([key, value]) => [key, resolve(value, all, seen)]));
}
function show(path, method, operation, all, parent) {
  const box = make("details", "", parent), head = make("summary", "", box);
  make("span", method.toUpperCase(), head).className = "method";
  make("code", path, head);
  make("span", "  " + operation.summary, head);
  const section = (title, value) => {
    make("p", title, box);
    make("pre", JSON.stringify(resolve(value, all, []), null, 2), box);
  };
  if (operation.parameters) section("Parameters", operation.parameters);
  if (operation.requestBody) section("Body", operation.requestBody.content["application/json"].schema);
  for (const [kind, content] of Object.entries(operation.responses["200"].content)) {
    section("Answer (" + kind + ")", content.schema);
  }
}
fetch("openapi.json").then(reply => reply.json()).then(page => {
  const main = document.getElementById("main"), groups = {};
  main.textContent = "";
  for (const [path, methods] of Object.entries(page.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      groups[tag] ??= (make("h2", tag, main), make("div", "", main));
      show(path, method, operation, page.components.schemas, groups[tag]);
    }
  }
});
</script></body></html>
"""
