// Whose tree and timelines are shown: a server shows its own, a gateway those of the worker that is chosen here, or of
// the one that has an answer of the chat.
import type { VNode } from "preact";
import { useState } from "preact/hooks";
import { type Access, ApiError, json, ofGateway } from "./api";
import type { Turn } from "./conversation";
import { usePolling } from "./polling";
import type { Answer } from "./timeline";

const EVERY_MS = 2000;

/** Where the view reads, and with which key. */
export interface Source {
  worker: string; // its id; empty: this server
  access: Access;
}

interface Named {
  id: string;
  url: string;
}

const OWN: Source = { worker: "", access: "api" };
let last = ""; // chosen, for the next view

interface Shown {
  wanted: string; // the worker that the address names
  show: (source: Source) => VNode;
}

export function OfWorker({ wanted, show }: Shown): VNode {
  return ofGateway ? <Chosen key={wanted} wanted={wanted} show={show} /> : show(OWN);
}

function Chosen({ wanted, show }: Shown): VNode {
  const [workers, setWorkers] = useState<Named[] | null>(null);
  const [chosen, setChosen] = useState(() => (last = wanted || last));
  const problem = usePolling(EVERY_MS, async (signal) => {
    setWorkers((await json<{ workers: Named[] }>("/workers", { access: "admin", signal })).workers);
  });
  const worker = workers?.find(({ id }) => id === chosen) ?? workers?.[0];
  return (
    <>
      {problem && <p class="error" role="alert">{problem}</p>}
      {workers?.length === 0 && <p class="hint">No workers yet.</p>}
      {worker && (
        <>
          <label class="worker">
            Worker
            <select
              value={worker.id}
              onChange={(event) => {
                last = (event.target as HTMLSelectElement).value;
                setChosen(last);
                if (wanted) location.hash = location.hash.split("/")[0]!; // the request is not there
              }}
            >
              {workers!.map(({ id, url }) => <option key={id} value={id}>{url}</option>)}
            </select>
          </label>
          <div key={worker.id}>{show({ worker: worker.id, access: "admin" })}</div>
        </>
      )}
    </>
  );
}

/** Whether a worker's answer says that it has no page: engines of other kinds have none. */
export const hasNoPage = (error: unknown): boolean =>
  error instanceof SyntaxError || (error instanceof ApiError && [404, 405, 501].includes(error.status));

export const NO_PAGE = "This worker shows neither tree nor timelines: it is not a Bough server, or runs with --disable-ui.";

/** The address of an answer's timeline; none where it is not known who has it. */
export function timelineOfAnswer({ rid, worker }: Turn): string {
  if (!rid || (ofGateway && !worker)) return "";
  return `#timelines/${encodeURIComponent(rid)}${worker ? `/${worker}` : ""}`;
}

const NOTHING_SINCE = 1e15; // a time that no clock reaches: only what runs is sent, and which request was asked for

/** Finds the worker that has an answer's timeline, and notes it in the turn. Needs the management key, which is not asked
 * for; engines of other kinds have no timelines. The routing decision tells whom to ask first: another process of the
 * gateway may have made it. */
export async function findWorker(turn: Turn): Promise<void> {
  const quiet = { access: "admin", quiet: true } as const;
  const has = async ({ id }: Named): Promise<string> => {
    const { replicas } = await json<{ replicas: Answer[] }>(`/ui/timeline/${id}/${NOTHING_SINCE}/${encodeURIComponent(turn.rid)}`, quiet);
    if (replicas.every(({ found }) => found === null)) throw new Error("It has other requests.");
    return id;
  };
  try {
    const { workers } = await json<{ workers: Named[] }>("/workers", quiet);
    const { requests } = await json<{ requests: { request_id: string; worker: string | null }[] }>("/routing", quiet);
    const told = requests.findLast(({ request_id }) => request_id === turn.requestId)?.worker;
    const [first, others] = [workers.filter(({ url }) => url === told), workers.filter(({ url }) => url !== told)];
    turn.worker = await Promise.any(first.map(has)).catch(() => Promise.any(others.map(has)));
  } catch (error) {
    if (!(error instanceof ApiError && error.wantsKey)) turn.worker = ""; // with another key it may be found
  }
}
