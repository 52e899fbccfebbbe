// What a view reads again and again while it is shown: a hidden tab reads nothing, and a refused key is not tried again.
import { useEffect, useState } from "preact/hooks";
import { ApiError, messageOf } from "./api";

/** Calls `read` at once, then `everyMs`, and anew when `subject` changes or keys are given; returns what went wrong last. */
export function usePolling(everyMs: number, read: (signal: AbortSignal) => Promise<void>, subject = ""): string {
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    let refused = false; // asking again without a key would open the dialog again
    const poll = async (): Promise<void> => {
      if (document.hidden || refused) return;
      try {
        await read(stop.signal);
        setProblem("");
      } catch (error) {
        if (stop.signal.aborted) return;
        refused = error instanceof ApiError && error.wantsKey;
        setProblem(messageOf(error));
      }
    };
    const again = (): void => {
      refused = false;
      void poll();
    };
    void poll();
    const timer = setInterval(() => void poll(), everyMs);
    window.addEventListener("bough-keys", again, { signal: stop.signal });
    return () => {
      clearInterval(timer);
      stop.abort();
    };
  }, [subject]);
  return problem;
}
