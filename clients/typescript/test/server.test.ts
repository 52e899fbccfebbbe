/** Against real processes, whose addresses the tests of the server give: a model, vectors, and a gateway with keys. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { Bough, type ChatRequest, type GenerateOutput, type Routed, type Worker } from "../src/index.js";

const { BOUGH_URL, BOUGH_VECTORS_URL, BOUGH_GATEWAY_URL } = process.env;
const GREEDY: ChatRequest = {
  messages: [{ role: "user", content: "Say hello to Ada." }],
  temperature: 0,
  max_tokens: 12,
};
const WORKER: Record<keyof Worker, true> = {
  id: true, url: true, model_id: true, models: true, worker_type: true, bootstrap_port: true, is_healthy: true,
  state: true, load: true, reported_load: true, capacity: true, limit: true, breaker: true, source: true,
  version: true, pid: true, restarts: true, last_error: true,
};
const ROUTED: Record<keyof Routed, true> = {
  time: true, request_id: true, method: true, path: true, status: true, model: true, worker: true, reason: true,
  expected_cached: true, attempts: true, retries: true, moves: true, failovers: true, hedges: true, error: true,
  client: true, queued_ms: true, first_byte_ms: true, duration_ms: true, bytes: true,
};

test("the server", { skip: BOUGH_URL ? false : "BOUGH_URL is not set" }, async (t) => {
  const client = new Bough({ baseUrl: BOUGH_URL! });

  await t.test("a chat, whole and streamed", async () => {
    const whole = await client.chat(GREEDY);
    let text = "";
    let finish: string | null | undefined;
    for await (const chunk of client.streamChat(GREEDY)) {
      text += chunk.choices[0]?.delta.content ?? "";
      finish ??= chunk.choices[0]?.finish_reason;
    }
    assert.ok(text.length > 0 && whole.usage.completion_tokens > 1);
    assert.equal(text, whole.choices[0]?.message.content);
    assert.equal(finish, whole.choices[0]?.finish_reason);
  });

  await t.test("an answer that matches a schema", async () => {
    const schema = { type: "object", properties: { age: { type: "integer" } }, required: ["age"] };
    const format = { type: "json_schema", json_schema: { name: "age", schema } };
    const answer = await client.chat({ ...GREEDY, max_tokens: 40, response_format: format });
    assert.equal(typeof JSON.parse(answer.choices[0]?.message.content ?? "").age, "number");
  });

  await t.test("a completion, whole and streamed", async () => {
    const asked = { prompt: "The capital of France is", temperature: 0, max_tokens: 8 };
    const whole = await client.complete(asked);
    let text = "";
    for await (const chunk of client.streamCompletion(asked)) text += chunk.choices[0]?.text ?? "";
    assert.match(text, /Paris/);
    assert.equal(text, whole.choices[0]?.text);
  });

  await t.test("native generation of a batch, whole and streamed", async () => {
    const asked = { text: ["One, two,", "Red, green,"], sampling_params: { temperature: 0, max_new_tokens: 6 } };
    const whole = (await client.generate(asked)) as GenerateOutput[];
    const last: (string | null | undefined)[] = [];
    for await (const output of client.streamGenerate(asked)) last[output.index ?? 0] = output.text;
    assert.equal(whole.length, 2);
    assert.deepEqual(last, whole.map((each) => each.text));
  });

  await t.test("other routes by their path", async () => {
    const { tokens, count } = await client.post("/tokenize", { prompt: "Hello there" });
    assert.equal(tokens.length, count);
    assert.equal((await client.models()).data.length, 1);
    assert.equal((await client.get("/v1/loads")).loads[0]?.num_running_reqs, 0);
  });

  await t.test("an abort ends the stream here and the request there", async () => {
    const stop = new AbortController();
    const asked = { ...GREEDY, max_tokens: 4000, ignore_eos: true };
    let chunks = 0;
    await assert.rejects(
      async () => {
        for await (const _ of client.streamChat(asked, { signal: stop.signal })) if (++chunks === 3) stop.abort();
      },
      { name: "AbortError" },
    );
    assert.equal(chunks, 3);
    while ((await client.get("/v1/loads")).loads[0]?.num_running_reqs !== 0) await sleep(20);
  });

  await t.test("an error names the field", async () => {
    await assert.rejects(client.chat({ ...GREEDY, temperature: -3 }), { status: 400, param: "temperature" });
    await assert.rejects(client.embed({ input: "a text" }), { status: 400, name: "BoughError" });
  });
});

test("vectors", { skip: BOUGH_VECTORS_URL ? false : "BOUGH_VECTORS_URL is not set" }, async () => {
  const client = new Bough({ baseUrl: BOUGH_VECTORS_URL! });
  const { data } = await client.embed({ input: ["The cat sits outside.", "A cat is outdoors.", "Taxes are due."] });
  const vectors = data.map((each) => each.embedding as number[]);
  const alike = (a: number, b: number) =>
    vectors[a]!.reduce((sum, value, i) => sum + value * vectors[b]![i]!, 0);
  assert.ok(alike(0, 1) > 0.5 && alike(0, 1) > alike(0, 2) + 0.3);
});

test("the gateway", { skip: BOUGH_GATEWAY_URL ? false : "BOUGH_GATEWAY_URL is not set" }, async (t) => {
  const baseUrl = BOUGH_GATEWAY_URL!;
  const client = new Bough({ baseUrl, apiKey: "user-key", adminApiKey: "admin-key" });

  await t.test("keys", async () => {
    await assert.rejects(new Bough({ baseUrl }).chat(GREEDY), { status: 401 });
    await assert.rejects(new Bough({ baseUrl, apiKey: "user-key" }).gateway.workers(), { status: 401 });
    assert.ok((await client.chat(GREEDY)).choices[0]?.message.content);
  });

  await t.test("workers come and go", async () => {
    const [worker, ...others] = await client.gateway.workers();
    assert.ok(worker?.is_healthy && others.length === 0);
    assert.deepEqual(Object.keys(worker).sort(), Object.keys(WORKER).sort());
    assert.equal((await client.gateway.readiness()).healthy_workers, 1);
    assert.deepEqual((await client.gateway.flushCaches()).workers, { [worker.url]: 200 });
    assert.ok((await client.gateway.policies()).default);
    const routed = (await client.gateway.routing()).at(-1)!; // the chat above
    assert.deepEqual(Object.keys(routed).sort(), Object.keys(ROUTED).sort());
    assert.deepEqual([routed.worker, routed.status, routed.attempts], [worker.url, 200, 1]);
    assert.equal(routed.reason, "no other could take it");
    await assert.rejects(client.gateway.restartWorker(worker.id), { status: 409 });
    const added = await client.gateway.addWorker({ url: "http://127.0.0.1:9" });
    assert.equal((await client.gateway.worker(added.id)).url, "http://127.0.0.1:9");
    assert.equal((await client.gateway.drainWorker(added.id)).id, added.id);
    assert.equal((await client.gateway.removeWorker(added.id)).id, added.id);
    await assert.rejects(client.gateway.worker(added.id), { status: 404 });
  });
});
