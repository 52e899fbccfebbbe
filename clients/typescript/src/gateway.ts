/** The gateway's own routes, which need the admin key where there is one. */
import type { CallOptions, Transport } from "./transport.js";

export interface Worker {
  id: string;
  url: string;
  model_id: string | null;
  models: string[];
  worker_type: "regular" | "prefill" | "decode";
  bootstrap_port: number | null;
  /** Whether it gets requests. */
  is_healthy: boolean;
  state: string;
  load: number;
  reported_load: number | null;
  capacity: number | null;
  limit: number | null;
  breaker: string;
  source: string;
  version: string | null;
  pid: number | null;
  restarts: number;
  last_error: string | null;
}

export interface NewWorker {
  url: string;
  api_key?: string;
  worker_type?: "regular" | "prefill" | "decode";
  bootstrap_port?: number;
}

export interface Readiness {
  status: string;
  healthy_workers: number;
  total_workers: number;
}

/** The status of each worker's answer by its address; 0 where there was none. */
export interface FannedOut {
  workers: Record<string, number>;
}

/** Names: of the policy of all models that have none of their own, and of those that have. */
export interface Policies {
  default: string;
  models: Record<string, string>;
}

/** A request that has ended, as the gateway's access log has it. */
export interface Routed {
  /** Seconds since 1970. */
  time: number;
  request_id: string;
  method: string;
  path: string;
  status: number;
  model: string | null;
  worker: string | null;
  /** Why that worker: the name of the policy, or what stood above it. */
  reason: string;
  /** The share of the prompt that the policy expected in the worker's cache. */
  expected_cached: number;
  attempts: number;
  retries: number;
  moves: number;
  failovers: number;
  hedges: number;
  error: string | null;
  client: string | null;
  queued_ms: number;
  first_byte_ms: number | null;
  duration_ms: number;
  bytes: number;
}

export class Gateway {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  async workers(call: CallOptions = {}): Promise<Worker[]> {
    return (await this.#transport.json<{ workers: Worker[] }>("GET", "/workers", undefined, call, true)).workers;
  }

  worker(id: string, call: CallOptions = {}): Promise<Worker> {
    return this.#transport.json("GET", at(id), undefined, call, true);
  }

  /** It gets requests as soon as its health is known: ask `worker` until `is_healthy`. */
  addWorker(worker: NewWorker, call: CallOptions = {}): Promise<Worker> {
    return this.#transport.json("POST", "/workers", worker, call, true);
  }

  removeWorker(id: string, call: CallOptions = {}): Promise<Worker> {
    return this.#transport.json("DELETE", at(id), undefined, call, true);
  }

  /** It gets no further requests; those that run end. */
  drainWorker(id: string, call: CallOptions = {}): Promise<Worker> {
    return this.#transport.json("POST", `${at(id)}/drain`, undefined, call, true);
  }

  /** Of a worker that the gateway has launched. Not tried again: a restart that was lost on the way back is one. */
  restartWorker(id: string, call: CallOptions = {}): Promise<Worker> {
    return this.#transport.json("POST", `${at(id)}/restart`, undefined, { maxRetries: 0, ...call }, true);
  }

  policies(call: CallOptions = {}): Promise<Policies> {
    return this.#transport.json("GET", "/policies", undefined, call, true);
  }

  /** Of one model, or of all that have none of their own. */
  setPolicy(
    policy: { policy: string; model?: string; options?: Record<string, unknown> },
    call: CallOptions = {},
  ): Promise<Policies> {
    return this.#transport.json("PUT", "/policies", policy, call, true);
  }

  /** Where the last requests went, and why; the latest is the last. */
  async routing(call: CallOptions = {}): Promise<Routed[]> {
    return (await this.#transport.json<{ requests: Routed[] }>("GET", "/routing", undefined, call, true)).requests;
  }

  flushCaches(call: CallOptions = {}): Promise<FannedOut> {
    return this.#transport.json("POST", "/flush_cache", undefined, call, true);
  }

  /** A gateway without a worker answers 503, which is an error here too. */
  readiness(call: CallOptions = {}): Promise<Readiness> {
    return this.#transport.json("GET", "/readiness", undefined, call);
  }
}

function at(id: string): string {
  return `/workers/${encodeURIComponent(id)}`;
}
