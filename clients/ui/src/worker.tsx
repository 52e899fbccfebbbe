// Whose tree and timelines are shown: a server shows its own, a gateway those of the worker that is chosen here.
import type { VNode } from "preact";
import { useState } from "preact/hooks";
import { type Access, json, ofGateway } from "./api";
import { usePolling } from "./polling";

const EVERY_MS = 2000;

/** Where the view reads, and with which key. */
export interface Source {
  worker: string; // its id; empty: this server
  access: Access;
}

const OWN: Source = { worker: "", access: "api" };
let last = ""; // chosen, for the next view

export function OfWorker({ show }: { show: (source: Source) => VNode }): VNode {
  return ofGateway ? <Chosen show={show} /> : show(OWN);
}

function Chosen({ show }: { show: (source: Source) => VNode }): VNode {
  const [workers, setWorkers] = useState<{ id: string; url: string }[] | null>(null);
  const [chosen, setChosen] = useState(last);
  const problem = usePolling(EVERY_MS, async (signal) => {
    setWorkers((await json<{ workers: { id: string; url: string }[] }>("/workers", { access: "admin", signal })).workers);
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
