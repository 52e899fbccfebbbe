// Calls of the server that this page came from, with the keys that the user has given for this tab.

export const base = location.pathname.replace(/\/ui\/?$/, "");
export const ofGateway = document.body.dataset.of === "gateway";

export type Access = "api" | "admin";
const NAMES: Record<Access, string> = { api: "bough-api-key", admin: "bough-management-key" };

/** Keys live as long as the tab: they are in no file and no address. */
export const keys = {
  get: (access: Access): string => sessionStorage.getItem(NAMES[access]) ?? "",
  set(given: Record<Access, string>): void {
    for (const access of ["api", "admin"] as const) sessionStorage.setItem(NAMES[access], given[access]);
    window.dispatchEvent(new Event("bough-keys"));
  },
};

export class ApiError extends Error {
  constructor(readonly status: number, message: string) {
    super(message);
  }
  get wantsKey(): boolean {
    return this.status === 401 || this.status === 403;
  }
}

interface Options {
  access?: Access;
  body?: unknown;
  signal?: AbortSignal;
  quiet?: boolean; // a missing key is not asked for
}

export async function call(path: string, { access = "api", body, signal, quiet = false }: Options = {}): Promise<Response> {
  const key = keyFor(access);
  const headers: Record<string, string> = key ? { authorization: `Bearer ${key}` } : {};
  const init: RequestInit = { headers, cache: "no-store", ...(signal && { signal }) };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    init.method = "POST";
    init.body = JSON.stringify(body);
  }
  const response = await fetch(base + path, init);
  if (response.ok) return response;
  const error = new ApiError(response.status, await reason(response));
  // A call that began before a key was given must not ask for it again.
  if (response.status === 401 && key === keyFor(access) && !quiet) window.dispatchEvent(new CustomEvent("bough-key-wanted", { detail: access }));
  throw error;
}

/** Where only one key was given, that is sent: many servers have but one. */
function keyFor(access: Access): string {
  return keys.get(access) || keys.get(access === "api" ? "admin" : "api");
}

async function reason(response: Response): Promise<string> {
  const text = await response.text();
  try {
    const found = JSON.parse(text).error;
    return (typeof found === "string" ? found : found?.message) || text;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

export async function json<T>(path: string, options?: Options): Promise<T> {
  return (await call(path, options)).json();
}

/** The data of each server-sent event, as text. */
export async function* events(response: Response): AsyncGenerator<string> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split(/\r?\n\r?\n/);
      rest = parts.pop()!;
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined); // the stream may have broken, which the reader has been told already
  }
}

export const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));
