// The gateway's workers: state, breaker, load, how requests were spread, and why each went where it did.
import type { VNode } from "preact";
import { useState } from "preact/hooks";
import { json } from "./api";
import { Figure } from "./charts";
import { count, duration, percent } from "./format";
import { usePages } from "./overview";
import { usePolling } from "./polling";

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

/** A line of the gateway's access log. */
interface Routed {
  time: number; // seconds since 1970
  request_id: string;
  path: string;
  status: number;
  attempts: number;
  worker: string | null;
  reason: string;
  expected_cached: number; // share of the prompt
  queued_ms: number;
  first_byte_ms: number | null;
}

interface Policies {
  default: string;
  models: Record<string, string>;
}

function why({ reason, expected_cached, worker }: Routed): string {
  const share = expected_cached > 0 ? `${percent(expected_cached)} of the prompt cached on ${worker}` : "";
  return [reason, share].filter(Boolean).join("; ") || "–";
}

export function Gateway(): VNode {
  const [workers, setWorkers] = useState<Worker[]>([]);
  const [policies, setPolicies] = useState<Policies | null>(null);
  const [routed, setRouted] = useState<Routed[]>([]);
  const [pages] = usePages();
  const problem = usePolling(2000, async (signal) => {
    setWorkers((await json<{ workers: Worker[] }>("/workers", { access: "admin", signal })).workers);
    setPolicies(await json<Policies>("/policies", { access: "admin", signal }));
    setRouted((await json<{ requests: Routed[] }>("/routing", { access: "admin", signal })).requests.reverse());
  });
  const last = pages.at(-1);
  const prompts = last?.sum("prompt_tokens_total") ?? NaN;
  const sent = last?.sum("attempts_total") ?? NaN;
  // A count has no sample until something is counted.
  const of = (name: string, url: string): number => (last ? last.sum(name, ({ worker }) => worker === url) || 0 : NaN);
  return (
    <section class="overview" aria-label="Workers">
      {problem && <p class="error" role="alert">{problem}</p>}
      <dl class="figures">
        <Figure label="Policy" value={policies?.default ?? "–"} />
        <Figure label="Expected cache hits" value={percent((last?.sum("expected_cached_tokens_total") ?? NaN) / prompts)} note="of prompt tokens" />
        <Figure label="Actual cache hits" value={percent((last?.sum("cached_tokens_total") ?? NaN) / prompts)} note="of prompt tokens" />
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
      {!problem && workers.length === 0 && <p class="hint">No workers yet.</p>}
      <h2>Routing decisions</h2>
      {routed.length === 0 ? <p class="hint">No completed requests yet.</p> : (
        <div class="scroll routed" tabIndex={0} role="region" aria-label="Routing decisions">
          <table>
            <thead>
              <tr><th>Time</th><th>Path</th><th>Worker</th><th>Reason</th><th>Attempts</th><th>Queued</th><th>First byte</th><th>Status</th></tr>
            </thead>
            <tbody>
              {routed.map((each) => (
                <tr key={each.request_id} title={each.request_id}>
                  <td>{new Date(each.time * 1000).toLocaleTimeString()}</td>
                  <td>{each.path}</td>
                  <td>{each.worker ?? "–"}</td>
                  <td>{why(each)}</td>
                  <td>{each.attempts}</td>
                  <td>{duration(each.queued_ms / 1000)}</td>
                  <td>{each.first_byte_ms === null ? "–" : duration(each.first_byte_ms / 1000)}</td>
                  <td><span class={each.status < 400 ? "good" : "bad"}>{each.status}</span></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
