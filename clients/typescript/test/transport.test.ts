import assert from "node:assert/strict";
import { test } from "node:test";
import { Bough, BoughError, ConnectionError } from "../src/index.js";
import { json, scripted } from "./scripted.js";

const BUSY = { error: { message: "The queue is full.", type: "TooManyRequestsError", code: 429, retryable: true } };
const ASKED = { prompt: "a" };
const QUICK = { retryBaseMs: 1 };
const HEAD = { "content-type": "text/event-stream" };

async function all<T>(stream: AsyncIterable<T>): Promise<T[]> {
  const found: T[] = [];
  for await (const each of stream) found.push(each);
  return found;
}

test("a 429 and a 503 are tried again, with the key and the body", async () => {
  const server = await scripted((_, response, attempt) => {
    if (attempt < 3) json(response, attempt === 1 ? 429 : 503, BUSY);
    else json(response, 200, { id: "c", choices: [] });
  });
  try {
    const client = new Bough({ baseUrl: `${server.url}/`, apiKey: "k", ...QUICK });
    assert.equal((await client.complete(ASKED)).id, "c");
    assert.deepEqual(server.requests.map((each) => each.headers.authorization), Array(3).fill("Bearer k"));
  } finally {
    await server.close();
  }
});

test("after the last attempt the server's own error is raised", async () => {
  const server = await scripted((_, response) => json(response, 429, BUSY, { "x-request-id": "r1" }));
  try {
    const client = new Bough({ baseUrl: server.url, ...QUICK });
    await assert.rejects(client.complete(ASKED, { maxRetries: 1 }), (error: BoughError) => {
      assert.equal(error.message, "The queue is full.");
      assert.deepEqual([error.status, error.type, error.requestId], [429, "TooManyRequestsError", "r1"]);
      return true;
    });
    assert.equal(server.requests.length, 2);
  } finally {
    await server.close();
  }
});

test("other errors are raised at once, with the field; so is what is no JSON", async () => {
  const wrong = { error: { message: "too hot", type: "BadRequestError", param: "temperature", code: null } };
  const server = await scripted((_, response, attempt) => {
    if (attempt === 1) json(response, 400, wrong);
    else response.writeHead(502).end("<html>");
  });
  try {
    const client = new Bough({ baseUrl: server.url, ...QUICK });
    await assert.rejects(client.complete(ASKED), { message: "too hot", param: "temperature", status: 400 });
    await assert.rejects(client.complete(ASKED), { message: /502.*<html>/, status: 502 });
    assert.equal(server.requests.length, 2);
  } finally {
    await server.close();
  }
});

test("a connection that is closed without an answer is tried again", async () => {
  const server = await scripted((request, response, attempt) => {
    if (attempt === 1) request.socket.destroy();
    else json(response, 200, { id: "c", choices: [] });
  });
  try {
    assert.equal((await new Bough({ baseUrl: server.url, ...QUICK }).complete(ASKED)).id, "c");
  } finally {
    await server.close();
  }
  const nobody = new Bough({ baseUrl: server.url, maxRetries: 1, ...QUICK });
  await assert.rejects(nobody.complete(ASKED), (error: Error) => error instanceof ConnectionError);
});

test("nothing is tried again after the first byte of a stream", async () => {
  const server = await scripted((request, response, attempt) => {
    response.writeHead(200, HEAD);
    response.write('data: {"id": "1", "choices": []}\n\n', () => {
      if (attempt === 1) request.socket.destroy();
      else if (attempt === 2) response.end();
      else response.end('data: {"error": {"message": "died", "type": "EngineDeadError", "code": 503}}\n\n');
    });
  });
  try {
    const client = new Bough({ baseUrl: server.url, ...QUICK });
    await assert.rejects(all(client.streamCompletion(ASKED)), { name: "ConnectionError" });
    await assert.rejects(all(client.streamCompletion(ASKED)), { message: /broke off/ });
    await assert.rejects(all(client.streamCompletion(ASKED)), { message: "died", status: 503 });
    assert.equal(server.requests.length, 3);
  } finally {
    await server.close();
  }
});

test("leaving the loop closes the connection", async () => {
  let closed: () => void;
  const gone = new Promise<void>((resolve) => (closed = resolve));
  const server = await scripted((_, response) => {
    response.on("close", () => closed());
    response.writeHead(200, HEAD);
    response.write('data: {"id": "1", "choices": []}\n\n');
  });
  try {
    for await (const _ of new Bough({ baseUrl: server.url }).streamCompletion(ASKED)) break;
    await gone;
  } finally {
    await server.close();
  }
});

test("a stream that is aborted for a reason ends with that reason", async () => {
  const server = await scripted((_, response) => {
    response.writeHead(200, HEAD);
    response.write('data: {"id": "1", "choices": []}\n\n');
  });
  const stop = new AbortController();
  try {
    const client = new Bough({ baseUrl: server.url });
    await assert.rejects(
      async () => {
        for await (const _ of client.streamCompletion(ASKED, { signal: stop.signal })) stop.abort(new Error("enough"));
      },
      { message: "enough" },
    );
  } finally {
    await server.close();
  }
});

test("a signal ends the wait for another attempt, and a call that was never made", async () => {
  const stop = new AbortController();
  const server = await scripted((_, response) => {
    json(response, 503, BUSY, { "retry-after": "3600" });
    setImmediate(() => stop.abort());
  });
  try {
    const client = new Bough({ baseUrl: server.url });
    await assert.rejects(client.complete(ASKED, { signal: stop.signal }), { name: "AbortError" });
    await assert.rejects(client.complete(ASKED, { signal: stop.signal }), { name: "AbortError" });
    assert.equal(server.requests.length, 1);
  } finally {
    await server.close();
  }
});

test("a recording goes as a form, each time it is tried; text comes as text", async () => {
  const server = await scripted((_, response, attempt) => {
    if (attempt === 1) json(response, 503, BUSY);
    else if (attempt === 2) json(response, 200, { text: "Hello." });
    else response.writeHead(200, { "content-type": "text/plain; charset=utf-8" }).end("Hello.\n");
  });
  try {
    const client = new Bough({ baseUrl: server.url, ...QUICK });
    const file = new Blob(["RIFF"]);
    const { text } = await client.transcribe({
      file,
      temperature: 0.2,
      prompt: undefined,
      timestamp_granularities: ["segment", "word"],
      response_format: "verbose_json",
    });
    const plain: string = await client.translate({ file, response_format: "text" });
    assert.deepEqual([text, plain], ["Hello.", "Hello.\n"]);
    const asked = server.requests.map((each) => each.url?.split("/").at(-1));
    assert.deepEqual(asked, ["transcriptions", "transcriptions", "translations"]);
    for (const [i, request] of server.requests.entries()) {
      const boundary = request.headers["content-type"]?.match(/^multipart\/form-data; boundary=(.+)$/)?.[1];
      const parts = server.bodies[i]!.split(`--${boundary}`).slice(1, -1);
      const names = parts.map((part) => part.match(/name="(\w+)"/)?.[1]);
      const given = ["file", "temperature", "timestamp_granularities", "timestamp_granularities", "response_format"];
      assert.deepEqual(names, i < 2 ? given : ["file", "response_format"]);
      assert.match(parts[0]!, /filename=.*\r\n\r\nRIFF\r\n$/s);
    }
  } finally {
    await server.close();
  }
});
