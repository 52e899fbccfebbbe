import assert from "node:assert/strict";
import { test } from "node:test";
import { EventReader } from "../src/events.js";

const STREAM = ": hello\n\nevent: x\ndata: {\"a\":\r\ndata: 1}\r\n\r\nid: 4\n\ndata:[DONE]\r\rdata: é\n\n";
const EVENTS = ['{"a":\n1}', "[DONE]", "é"];

test("events do not depend on how the text is cut", () => {
  for (let size = 1; size <= STREAM.length; size++) {
    const reader = new EventReader();
    const found: string[] = [];
    for (let i = 0; i < STREAM.length; i += size) found.push(...reader.push(STREAM.slice(i, i + size)));
    assert.deepEqual(found, EVENTS);
  }
});

test("an event without its empty line is not one yet", () => {
  assert.deepEqual([...new EventReader().push("data: 1\n")], []);
});
