// How busy the server is: its own /metrics, read every other second while this view is shown.
import type { VNode } from "preact";
import { useState } from "preact/hooks";
import { call, ofGateway } from "./api";
import { Bars, Figure, Lines } from "./charts";
import { count, percent } from "./format";
import { usePolling } from "./polling";
import { Page } from "./prometheus";

const EVERY_MS = 2000;
const KEPT = 120; // pages: four minutes

export function usePages(): [Page[], string] {
  const [pages, setPages] = useState<Page[]>([]);
  const problem = usePolling(EVERY_MS, async (signal) => {
    const page = new Page(await (await call("/metrics", { signal })).text(), performance.now() / 1000);
    setPages((before) => [...before, page].slice(-KEPT));
  });
  return [pages, problem];
}

type Read = (page: Page) => number;
const sum = (name: string): Read => (page) => page.sum(name);

/** How much a count grew in a second, between each two pages; one that fell began at 0 again, with the server. */
const rates = (pages: Page[], read: Read): number[] =>
  pages.slice(1).map((page, index) => {
    const [before, now] = [read(pages[index]!), read(page)];
    return (now < before ? now : now - before) / (page.time - pages[index]!.time);
  });

export function Overview(): VNode {
  const [pages, problem] = usePages();
  const last = pages.at(-1);
  return (
    <section class="overview" aria-label="Load">
      {problem && <p class="error" role="alert">{problem}</p>}
      {!last ? <p class="hint">Reading the metrics …</p> : ofGateway ? <OfGateway pages={pages} last={last} /> : <OfServer pages={pages} last={last} />}
    </section>
  );
}

interface Props {
  pages: Page[];
  last: Page;
}

function OfServer({ pages, last }: Props): VNode {
  const generated = rates(pages, sum("generation_tokens_total"));
  const prompts = rates(pages, sum("prompt_tokens_total"));
  const running = last.sum("num_running_reqs");
  const host = last.sum("hicache_host_total_tokens");
  const stored = last.sum("hicache_storage_written_tokens_total");
  return (
    <>
      <dl class="figures">
        <Figure label="Tokens/s" value={count(generated.at(-1) ?? NaN)} />
        <Figure label="Running" value={count(running)} />
        <Figure label="Waiting" value={count(last.sum("num_queue_reqs"))} />
        <Figure label="KV cache in use" value={percent(last.mean("token_usage"))} note={`of ${count(last.sum("max_total_num_tokens"))} tokens`} />
        {host > 0 && <Figure label="Host tier" value={percent(last.sum("hicache_host_used_tokens") / host)} note={`of ${count(host)} tokens`} />}
        {stored > 0 && (
          <Figure label="Storage tier" value={count(last.sum("hicache_storage_read_tokens_total"))}
            note={`tokens read, ${count(stored)} written, ${count(last.sum("hicache_storage_failures_total"))} failures`} />
        )}
        <Figure label="Cache hit rate" value={percent(last.mean("cache_hit_rate"))} note="of prompt tokens" />
        <Figure label="Device busy" value={percent(last.mean("device_busy_share"))} note="while there was work" />
        <Figure label="Aborted or failed" value={count(last.sum("num_aborted_requests_total"))} note={`of ${count(last.sum("num_requests_total"))}`} />
        <Figure label="Retractions" value={count(last.sum("num_retracted_requests_total"))} />
        <Figure label="Evicted tokens" value={count(last.sum("evicted_tokens_total"))} />
      </dl>
      <div class="charts">
        <Lines title="Tokens per second" series={[{ label: "generated", values: generated }, { label: "prompt", values: prompts }]} />
        <Lines title="Requests" series={[
          { label: "running", values: pages.map(sum("num_running_reqs")) },
          { label: "waiting", values: pages.map(sum("num_queue_reqs")) },
        ]} />
        <Lines title="Utilisation" show={percent} top={1} series={[
          { label: "KV cache", values: pages.map((page) => page.mean("token_usage")) },
          { label: "device", values: pages.map((page) => page.mean("device_busy_share")) },
        ]} />
        <Bars title="Time to first token (TTFT)" buckets={last.histogram("time_to_first_token_seconds")} />
        <Bars title="Inter-token latency (ITL)" buckets={last.histogram("inter_token_latency_seconds")} />
        <Bars title="Queue time" buckets={last.histogram("queue_time_seconds")} />
      </div>
    </>
  );
}

const failed = (page: Page): number => page.sum("requests_total", ({ status }) => Number(status) >= 400);

function OfGateway({ pages, last }: Props): VNode {
  const ended = rates(pages, sum("requests_total"));
  return (
    <>
      <dl class="figures">
        <Figure label="Requests/s" value={count(ended.at(-1) ?? NaN)} />
        <Figure label="Running" value={count(last.sum("running_requests"))} />
        <Figure label="Waiting" value={count(last.sum("waiting_requests"))} />
        <Figure label="Cache hit rate" value={percent(last.sum("cached_tokens_total") / last.sum("prompt_tokens_total"))} note="of prompt tokens" />
        <Figure label="Failed" value={count(failed(last))} note={`of ${count(last.sum("requests_total"))}`} />
        <Figure label="Retries" value={count(last.sum("retries_total"))} />
        <Figure label="Streams resumed" value={count(last.sum("stream_failovers_total"))} />
      </dl>
      <div class="charts">
        <Lines title="Requests per second" series={[{ label: "completed", values: ended }, { label: "failed", values: rates(pages, failed) }]} />
        <Lines title="Requests" series={[
          { label: "running", values: pages.map(sum("running_requests")) },
          { label: "waiting", values: pages.map(sum("waiting_requests")) },
        ]} />
        <Bars title="Time to first byte" buckets={last.histogram("first_byte_seconds")} />
        <Bars title="Request latency" buckets={last.histogram("request_seconds")} />
      </div>
    </>
  );
}
