/** An answer of the server that is an error, or a stream that ended with one. */
export class BoughError extends Error {
  override readonly name: string = "BoughError";

  constructor(
    message: string,
    /** The HTTP status; of an error inside a stream the code that the server gives, or 0. */
    readonly status: number,
    /** Such as `BadRequestError`. */
    readonly type: string,
    /** The field of the request that is wrong, where the server names one. */
    readonly param: string | null = null,
    /** Stands in the server's log too. */
    readonly requestId: string | null = null,
    /** Seconds that the server asks to wait. */
    readonly retryAfterS: number | null = null,
  ) {
    super(message);
  }
}

/** No answer, or one that broke off: the server could not be reached, or the connection was lost. */
export class ConnectionError extends Error {
  override readonly name: string = "ConnectionError";
}

/** What ends a call for good, such as the reason of a signal, goes on as it is; a TypeError is how `fetch` says that there
 * is no connection. */
export function lost(reason: unknown): ConnectionError {
  if (!(reason instanceof TypeError)) throw reason;
  const cause = (reason.cause as Error | undefined)?.message;
  return new ConnectionError(`The connection failed: ${cause ?? reason.message}.`, { cause: reason });
}

/** All protocols of the server but Ollama's have an object under `error`; Ollama's has a sentence. */
export function errorOf(body: unknown, status: number, headers?: Headers): BoughError | null {
  const found = (body as { error?: unknown } | null)?.error;
  if (found === undefined || found === null) return null;
  const said = typeof found === "string" ? { message: found } : (found as Record<string, unknown>);
  const wait = Number(headers?.get("retry-after") ?? NaN);
  return new BoughError(
    String(said["message"] ?? "The server gave no reason."),
    status || (typeof said["code"] === "number" ? said["code"] : 0),
    String(said["type"] ?? "Error"),
    typeof said["param"] === "string" ? said["param"] : null,
    headers?.get("x-request-id") ?? null,
    Number.isFinite(wait) ? wait : null,
  );
}
