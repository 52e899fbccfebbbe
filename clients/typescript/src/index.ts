/** A client of Bough's server and gateway. Types are those of the server's OpenAPI document. */
import { readEvents } from "./events.js";
import { Gateway } from "./gateway.js";
import type { components, paths } from "./schema.js";
import { type CallOptions, type Options, Transport } from "./transport.js";

export { BoughError, ConnectionError } from "./errors.js";
export { type FannedOut, Gateway, type NewWorker, type Policies, type Readiness, type Routed, type Worker } from "./gateway.js";
export type { CallOptions, Options } from "./transport.js";
export type { components, paths };

type Json<T> = T extends { content: { "application/json": infer J } } ? J : never;
type Events<T> = T extends { content: { "text/event-stream": infer E } } ? E : never;
type Form<T> = T extends { content: { "multipart/form-data": infer F } } ? F : never;
type Operation<P extends keyof paths, M extends "get" | "post"> = Exclude<paths[P][M], undefined>;
/** Routes that take a POST, or a GET, and have no parameter in their path. */
type Routes<M extends "get" | "post"> = {
  [P in keyof paths]: P extends `${string}{${string}` ? never : [paths[P][M]] extends [undefined] ? never : P;
}[keyof paths];

export type PostPath = Routes<"post">;
export type GetPath = Routes<"get">;
type Body<P extends PostPath> = Operation<P, "post"> extends { requestBody?: infer B } ? Exclude<B, undefined> : never;
/** What a route takes: JSON, or a form where it takes files. */
export type BodyOf<P extends PostPath> = [Form<Body<P>>] extends [never] ? Json<Body<P>> : FormData;
export type AnswerOf<P extends keyof paths, M extends "get" | "post"> =
  Operation<P, M> extends { responses: { 200: infer A } } ? Json<A> : never;
export type EventOf<P extends keyof paths> =
  Operation<P, "post"> extends { responses: { 200: infer A } } ? Events<A> : never;

/** A request without `stream`: which method is called says whether the answer is streamed. */
export type ChatRequest = Omit<BodyOf<"/v1/chat/completions">, "stream">;
export type ChatCompletion = AnswerOf<"/v1/chat/completions", "post">;
export type ChatChunk = EventOf<"/v1/chat/completions">;
export type CompletionRequest = Omit<BodyOf<"/v1/completions">, "stream">;
export type Completion = AnswerOf<"/v1/completions", "post">;
export type GenerateRequest = Omit<BodyOf<"/generate">, "stream">;
export type GenerateOutput = components["schemas"]["GenerateOutput"];
export type EmbeddingsRequest = BodyOf<"/v1/embeddings">;
export type Embeddings = AnswerOf<"/v1/embeddings", "post">;
/** A recording, as a `Blob` or a `File`, and how it is written down. */
export type RecordingRequest = Omit<Form<Body<"/v1/audio/transcriptions">>, "stream">;
/** Of a `response_format` without JSON, the text itself; segments and words come with `verbose_json`. */
export type Transcription<R extends RecordingRequest = RecordingRequest> = R extends {
  response_format: "text" | "srt" | "vtt";
}
  ? string
  : AnswerOf<"/v1/audio/transcriptions", "post"> & { text: string };
export type Stream<T> = AsyncGenerator<T, void, undefined>;

export class Bough {
  /** The management routes of a gateway. */
  readonly gateway: Gateway;
  readonly #transport: Transport;

  constructor(options: Options = {}) {
    this.#transport = new Transport(options);
    this.gateway = new Gateway(this.#transport);
  }

  chat(request: ChatRequest, call: CallOptions = {}): Promise<ChatCompletion> {
    return this.post("/v1/chat/completions", { ...request, stream: false }, call);
  }

  streamChat(request: ChatRequest, call: CallOptions = {}): Stream<ChatChunk> {
    return this.#stream("/v1/chat/completions", request, call);
  }

  complete(request: CompletionRequest, call: CallOptions = {}): Promise<Completion> {
    return this.post("/v1/completions", { ...request, stream: false }, call);
  }

  streamCompletion(request: CompletionRequest, call: CallOptions = {}): Stream<Completion> {
    return this.#stream("/v1/completions", request, call);
  }

  /** One output, or a list of them for several prompts or `n` above 1. */
  generate(request: GenerateRequest, call: CallOptions = {}): Promise<GenerateOutput | GenerateOutput[]> {
    return this.post("/generate", { ...request, stream: false }, call);
  }

  /** Each event has the whole text so far, as in SGLang; of several prompts `index` says which. */
  streamGenerate(request: GenerateRequest, call: CallOptions = {}): Stream<GenerateOutput> {
    return this.#stream("/generate", request, call);
  }

  embed(request: EmbeddingsRequest, call: CallOptions = {}): Promise<Embeddings> {
    return this.post("/v1/embeddings", request, call);
  }

  transcribe<const R extends RecordingRequest>(request: R, call: CallOptions = {}): Promise<Transcription<R>> {
    return this.#transport.json("POST", "/v1/audio/transcriptions", formOf(request), call);
  }

  /** To English text. */
  translate<const R extends RecordingRequest>(request: R, call: CallOptions = {}): Promise<Transcription<R>> {
    return this.#transport.json("POST", "/v1/audio/translations", formOf(request), call);
  }

  models(call: CallOptions = {}): Promise<AnswerOf<"/v1/models", "get">> {
    return this.get("/v1/models", call);
  }

  /** Any other route with a JSON answer, by its path; `/docs` on a running server lists them. */
  post<P extends PostPath>(path: P, body: BodyOf<P>, call: CallOptions = {}): Promise<AnswerOf<P, "post">> {
    return this.#transport.json("POST", path, body, call);
  }

  get<P extends GetPath>(path: P, call: CallOptions = {}): Promise<AnswerOf<P, "get">> {
    return this.#transport.json("GET", path, undefined, call);
  }

  async *#stream<T>(path: string, request: object, call: CallOptions): Stream<T> {
    const response = await this.#transport.send("POST", path, { ...request, stream: true }, call);
    if (response.body) yield* readEvents<T>(response.body);
  }
}

/** A list is a part for each of its values. */
function formOf(fields: object): FormData {
  const form = new FormData();
  for (const [name, given] of Object.entries(fields)) {
    for (const value of [given].flat()) {
      if (value instanceof Blob) form.append(name, value);
      else if (value !== undefined && value !== null) form.append(name, String(value));
    }
  }
  return form;
}
