/** The gateway's proto, loaded as it lies in the repository: other languages call the gateway by it. */
import assert from "node:assert/strict";
import { fileURLToPath } from "node:url";
import { test } from "node:test";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { Bough } from "../src/index.js";

const { BOUGH_GATEWAY_URL, BOUGH_GRPC_ADDRESS } = process.env;
const PROTO = fileURLToPath(new URL("../../../../bough/gateway/grpc/gateway.proto", import.meta.url));
const ASKED = { text: "The capital of France is", sampling: { max_tokens: 8, temperature: 0 } };

interface Reply {
  text: string;
  finish_reason: string;
}
type Done = (error: grpc.ServiceError | null, reply: Reply) => void;
type Caller = grpc.Client & {
  Generate(request: object, metadata: grpc.Metadata, done: Done): void;
  GenerateStream(request: object, metadata: grpc.Metadata): grpc.ClientReadableStream<Reply>;
};

function caller(): Caller {
  const loaded = grpc.loadPackageDefinition(loadSync(PROTO, { keepCase: true, defaults: true })) as any;
  return new loaded.bough.gateway.v1.Gateway(BOUGH_GRPC_ADDRESS, grpc.credentials.createInsecure());
}

test("gRPC answers as HTTP does", { skip: BOUGH_GRPC_ADDRESS ? false : "BOUGH_GRPC_ADDRESS is not set" }, async () => {
  const client = caller();
  const metadata = new grpc.Metadata();
  const whole = () =>
    new Promise<Reply>((resolve, reject) =>
      client.Generate(ASKED, metadata, (error, reply) => (error ? reject(error) : resolve(reply))),
    );
  try {
    await assert.rejects(whole(), { code: grpc.status.UNAUTHENTICATED });
    metadata.set("authorization", "Bearer user-key");
    const reply = await whole();
    const { choices } = await new Bough({ baseUrl: BOUGH_GATEWAY_URL!, apiKey: "user-key" }).complete({
      prompt: ASKED.text,
      ...ASKED.sampling,
    });
    assert.equal(reply.text, choices[0]?.text);
    let text = "";
    let finish = "";
    for await (const piece of client.GenerateStream(ASKED, metadata) as AsyncIterable<Reply>) {
      text += piece.text;
      finish ||= piece.finish_reason; // the usage comes behind it
    }
    assert.equal(text, reply.text);
    assert.equal(finish, reply.finish_reason);
  } finally {
    client.close();
  }
});
