/** Server-sent events, as the HTML standard cuts them: lines end with LF, CRLF or CR, events with an empty line. */
import { ConnectionError, errorOf, lost } from "./errors.js";

export class EventReader {
  #line = "";
  #afterReturn = false;
  #data: string[] = [];

  /** The data of the events that this text completes; comments and events without data are left out. */
  *push(text: string): Generator<string> {
    for (const char of text) {
      const second = this.#afterReturn && char === "\n"; // of a CRLF
      this.#afterReturn = char === "\r";
      if (second) continue;
      if (char !== "\n" && char !== "\r") {
        this.#line += char;
        continue;
      }
      const line = this.#line;
      this.#line = "";
      if (line === "") {
        if (this.#data.length > 0) yield this.#data.join("\n");
        this.#data = [];
      } else if (line === "data" || line.startsWith("data:")) {
        this.#data.push(line.slice(5).replace(/^ /, ""));
      }
    }
  }
}

/** The objects of a stream up to `[DONE]`. Leaving the loop early ends the request on the server, too. */
export async function* readEvents<T>(body: ReadableStream<Uint8Array>): AsyncGenerator<T, void, undefined> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const events = new EventReader();
  let done = false;
  try {
    while (true) {
      const piece = await reader.read().catch((reason: unknown) => {
        throw lost(reason);
      });
      if (piece.done) throw new ConnectionError("The stream broke off before its end.");
      for (const data of events.push(decoder.decode(piece.value, { stream: true }))) {
        if (data === "[DONE]") {
          done = true;
          return;
        }
        const event = JSON.parse(data) as T;
        const error = errorOf(event, 0);
        if (error) throw error;
        yield event;
      }
    }
  } finally {
    // A stream that was read to its end leaves the connection to the next request.
    if (done) while (!(await reader.read().catch(() => ({ done: true }))).done);
    else await reader.cancel().catch(() => undefined);
  }
}
