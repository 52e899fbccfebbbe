// The gateway's workers: state, breaker, load, and how requests were spread.
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";
import { json, messageOf } from "./api";
import { Figure } from "./charts";
import { count, percent } from "./format";
import { usePages } from "./overview";

interface Worker {
  id: string;
  url: string;
  model_id: string | null;
  worker_type: string;
  state: string;
  is_healthy: boolean;
  load: number;
  limit: number | null;
  capacity: number | null;
  breaker: string;
  source: string;
  version: string | null;
  restarts: number;
  last_error: string | null;
}

interface Policies {
  default: string;
  models: Record<string, string>;
}

export function Gateway(): VNode {
  const [workers, setWorkers] = useState<Worker[]>([]);
  const [policies, setPolicies] = useState<Policies | null>(null);
  const [problem, setProblem] = useState("");
  const [pages] = usePages();
  useEffect(() => {
    let refused = false; // asking again without a key would open the dialog again
    const read = async (): Promise<void> => {
      if (document.hidden || refused) return;
      try {
        setWorkers((await json<{ workers: Worker[] }>("/workers", { access: "admin" })).workers);
        setPolicies(await json<Policies>("/policies", { access: "admin" }));
        setProblem("");
      } catch (error) {
        refused = "wantsKey" in (error as object) && (error as { wantsKey: boolean }).wantsKey;
        setProblem(messageOf(error));
      }
    };
    const again = (): void => {
      refused = false;
      void read();
    };
    void read();
    const timer = setInterval(() => void read(), 2000);
    window.addEventListener("bough-keys", again);
    return () => {
      clearInterval(timer);
      window.removeEventListener("bough-keys", again);
    };
  }, []);
  const last = pages.at(-1);
  const prompts = last?.sum("prompt_tokens_total") ?? NaN;
  const sent = last?.sum("attempts_total") ?? NaN;
  const of = (name: string, url: string): number => last?.sum(name, ({ worker }) => worker === url) ?? NaN;
  return (
    <section class="overview" aria-label="Workers">
      {problem && <p class="error" role="alert">{problem}</p>}
      <dl class="figures">
        <Figure label="Policy" value={policies?.default ?? "–"} />
        <Figure label="Expected in caches" value={percent((last?.sum("expected_cached_tokens_total") ?? NaN) / prompts)} note="of prompt tokens" />
        <Figure label="Found there" value={percent((last?.sum("cached_tokens_total") ?? NaN) / prompts)} note="of prompt tokens" />
        <Figure label="Moved, hedged" value={`${count(last?.sum("moves_total") ?? NaN)}, ${count(last?.sum("hedges_total") ?? NaN)}`} />
      </dl>
      {Object.entries(policies?.models ?? {}).map(([model, policy]) => <p key={model}>{model}: {policy}</p>)}
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of workers">
        <table>
          <thead>
            <tr><th>Worker</th><th>Model</th><th>State</th><th>Breaker</th><th>Load</th><th>Sent</th><th>Failed</th><th>Last error</th></tr>
          </thead>
          <tbody>
            {workers.map((worker) => (
              <tr key={worker.id}>
                <th scope="row">
                  {worker.url}
                  {worker.worker_type !== "regular" && <small> {worker.worker_type}</small>}
                </th>
                <td>{worker.model_id ?? "–"}</td>
                <td><span class={worker.is_healthy ? "good" : "bad"}>{worker.state}</span></td>
                <td><span class={worker.breaker === "closed" ? "good" : "bad"}>{worker.breaker}</span></td>
                <td>{worker.load}{worker.capacity ? ` of ${worker.capacity}` : ""}</td>
                <td>{count(of("attempts_total", worker.url))} <small>({percent(of("attempts_total", worker.url) / sent)})</small></td>
                <td>{count(of("attempt_failures_total", worker.url))}</td>
                <td>{worker.last_error ?? ""}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {/* No links: a server refuses what another site's page leads to. */}
      {workers.length > 0 && <p class="hint">A worker's own page, with its tree, is at its address and /ui.</p>}
      {!problem && workers.length === 0 && <p class="hint">There is no worker yet.</p>}
    </section>
  );
}
