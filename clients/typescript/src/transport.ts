/** One call: key, retries with backoff, errors as exceptions. */
import { BoughError, type ConnectionError, errorOf, lost } from "./errors.js";

export interface Options {
  /** Where the server or the gateway is; `http://127.0.0.1:30000` if not given. */
  baseUrl?: string;
  /** Sent as `Authorization: Bearer`. */
  apiKey?: string;
  /** For the management routes, where they have a key of their own. */
  adminApiKey?: string;
  /** Further attempts after a 429, a 503 or without a connection; 3 if not given. */
  maxRetries?: number;
  /** The wait before the first further attempt, which doubles each time up to 30 times itself; 250 if not given. */
  retryBaseMs?: number;
  headers?: Record<string, string>;
  fetch?: typeof globalThis.fetch;
}

/** Of one call. */
export interface CallOptions {
  /** Ends the call, also while it waits for another attempt, and on the server too. */
  signal?: AbortSignal;
  maxRetries?: number;
  headers?: Record<string, string>;
}

export type Method = "GET" | "POST" | "PUT" | "DELETE";
const RETRIED = new Set([429, 503]);
const LONGEST = 30; // times the first wait

export class Transport {
  readonly #options: Options;
  readonly #base: string;

  constructor(options: Options) {
    this.#options = options;
    this.#base = (options.baseUrl ?? "http://127.0.0.1:30000").replace(/\/+$/, "");
  }

  async json<T>(method: Method, path: string, body: unknown, call: CallOptions, admin = false): Promise<T> {
    const response = await this.send(method, path, body, call, admin);
    const text = await response.text().catch((reason: unknown) => {
      throw lost(reason);
    });
    const json = response.headers.get("content-type")?.startsWith("application/json");
    return (json ? JSON.parse(text) : text) as T;
  }

  /** An answer that is no error. It is tried again only while nothing of an answer has come. */
  async send(method: Method, path: string, body: unknown, call: CallOptions, admin = false): Promise<Response> {
    const most = call.maxRetries ?? this.#options.maxRetries ?? 3;
    for (let attempt = 0; ; attempt++) {
      let failure: BoughError | ConnectionError;
      try {
        const response = await this.#once(method, path, body, call, admin);
        if (response.ok) return response;
        failure = await failureOf(response);
        if (!RETRIED.has(response.status)) throw failure;
      } catch (reason) {
        failure = reason instanceof BoughError ? reason : lost(reason);
        if (reason instanceof BoughError && !RETRIED.has(reason.status)) throw reason;
      }
      if (attempt >= most) throw failure;
      await pause(this.#waitMs(attempt, failure), call.signal);
    }
  }

  #once(method: Method, path: string, body: unknown, call: CallOptions, admin: boolean): Promise<Response> {
    const key = (admin ? this.#options.adminApiKey : undefined) ?? this.#options.apiKey;
    const headers: Record<string, string> = { ...this.#options.headers, ...call.headers };
    const form = body instanceof FormData; // whose type `fetch` writes, with its boundary
    if (body !== undefined && !form) headers["content-type"] = "application/json";
    if (key !== undefined) headers["authorization"] = `Bearer ${key}`;
    const ask = this.#options.fetch ?? globalThis.fetch;
    return ask(this.#base + path, {
      method,
      headers,
      body: form ? body : body === undefined ? null : JSON.stringify(body),
      signal: call.signal ?? null,
    });
  }

  /** Between half of the wait and all of it, so that clients which were refused together do not return together. */
  #waitMs(attempt: number, failure: BoughError | ConnectionError): number {
    const base = this.#options.retryBaseMs ?? 250;
    const wait = Math.min(base * 2 ** attempt, base * LONGEST) * (0.5 + Math.random() / 2);
    const asked = failure instanceof BoughError ? (failure.retryAfterS ?? 0) * 1000 : 0;
    return Math.max(wait, asked);
  }
}

async function failureOf(response: Response): Promise<BoughError> {
  const text = await response.text().catch(() => "");
  let body: unknown = null;
  try {
    body = JSON.parse(text);
  } catch (reason) {
    if (!(reason instanceof SyntaxError)) throw reason; // what stands before the server may answer in HTML
  }
  const plain = `The server answered ${response.status} ${response.statusText}: ${text.slice(0, 200)}`;
  return (
    errorOf(body, response.status, response.headers) ??
    new BoughError(plain, response.status, "Error", null, response.headers.get("x-request-id"))
  );
}

function pause(ms: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, ms);
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}
