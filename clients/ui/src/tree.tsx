// The radix tree as it grows, on a canvas: width is tokens, colour is age or hits, locked paths are marked.
import { Fragment, type VNode } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ApiError, call, events, json, messageOf } from "./api";
import { Figure } from "./charts";
import { count, duration, percent } from "./format";
import { across, layOut, type Layout, type Snapshot } from "./layout";
import { timelineOf } from "./timelines";
import { hasNoPage, NO_PAGE, type Source } from "./worker";

interface Shot {
  time: number; // seconds
  replicas: Snapshot[];
}

type Colour = "age" | "hits";
const PERIOD_MS = 1000;
const KEPT = 180; // snapshots that one can step back through
const LISTED = 12; // largest nodes, as text
const NAMED = 4; // requests of those that read a node

export function Tree({ source }: { source: Source }): VNode {
  const [shots, setShots] = useState<Shot[]>([]);
  const [problem, setProblem] = useState("");
  const [told, setTold] = useState(true);
  const [paused, setPaused] = useState(false);
  const [back, setBack] = useState(0); // snapshots before the latest, while paused
  const [rank, setRank] = useState(0);
  const [colour, setColour] = useState<Colour>("age");
  const [withText, setWithText] = useState(false);
  const held = useRef(paused);
  held.current = paused;

  useEffect(() => {
    const stop = new AbortController();
    void watch(source, stop.signal, (shot) => {
      setProblem("");
      setTold(true);
      if (!held.current) setShots((before) => [...before, shot].slice(-KEPT));
    }, (error) => {
      const silent = source.worker !== "" && hasNoPage(error);
      setTold(!silent);
      setProblem(silent ? "" : messageOf(error));
    });
    return () => stop.abort();
  }, []);

  const shot = shots.at(-1 - (paused ? back : 0));
  const snapshot = shot?.replicas[Math.min(rank, shot.replicas.length - 1)];
  return (
    <section class="tree" aria-label="Radix tree">
      <div class="row controls">
        <button type="button" aria-pressed={paused} onClick={() => { setPaused(!paused); setBack(0); }}>{paused ? "Resume" : "Pause"}</button>
        {paused && (
          <label>
            {back === 0 ? "latest" : `${duration(shots.at(-1)!.time - shot!.time)} before`}
            <input type="range" min={0} max={Math.max(0, shots.length - 1)} value={shots.length - 1 - back}
              onInput={(event) => setBack(shots.length - 1 - Number((event.target as HTMLInputElement).value))} />
          </label>
        )}
        <label>
          Colour
          <select value={colour} onChange={(event) => setColour((event.target as HTMLSelectElement).value as Colour)}>
            <option value="age">by age</option>
            <option value="hits">by hits</option>
          </select>
        </label>
        {(shot?.replicas.length ?? 0) > 1 && (
          <label>
            Replica
            <select value={rank} onChange={(event) => setRank(Number((event.target as HTMLSelectElement).value))}>
              {shot!.replicas.map((replica, index) => <option key={index} value={index}>{replica.dp_rank ?? index}</option>)}
            </select>
          </label>
        )}
        <label class="check">
          <input type="checkbox" checked={withText} onChange={(event) => setWithText((event.target as HTMLInputElement).checked)} />
          Text (management key)
        </label>
      </div>
      {problem && <p class="error" role="alert">{problem}</p>}
      {!told ? <p class="hint">{NO_PAGE}</p>
        : snapshot ? <Drawing source={source} snapshot={snapshot} shots={shots} time={shot!.time} rank={rank} colour={colour} withText={withText} />
        : !problem && <p class="hint">Waiting for the first snapshot …</p>}
    </section>
  );
}

/** Reads snapshots until the signal; while the tab is hidden nobody watches, and the engine makes none. */
async function watch(
  { worker, access }: Source, signal: AbortSignal, take: (shot: Shot) => void, fail: (error: unknown) => void,
): Promise<void> {
  const path = worker ? `/ui/tree/${worker}` : "/ui/tree";
  while (!signal.aborted) {
    if (document.hidden) {
      await once(document, "visibilitychange", signal);
      continue;
    }
    const stream = new AbortController();
    const hide = (): void => stream.abort();
    document.addEventListener("visibilitychange", hide);
    signal.addEventListener("abort", hide);
    try {
      for await (const data of events(await call(path, { access, signal: stream.signal }))) {
        const content: { replicas: Snapshot[]; error?: { message: string } } = JSON.parse(data);
        if (content.error) throw new Error(content.error.message);
        take({ time: performance.now() / 1000, replicas: content.replicas });
      }
      if (worker) await pause(PERIOD_MS); // a gateway's answer is one snapshot
    } catch (error) {
      if (!stream.signal.aborted) {
        fail(error);
        if (error instanceof ApiError && error.wantsKey) await once(window, "bough-keys", signal);
        else await pause(2 * PERIOD_MS);
      }
    } finally {
      document.removeEventListener("visibilitychange", hide);
      signal.removeEventListener("abort", hide);
    }
  }
}

const pause = (ms: number): Promise<void> => new Promise((resume) => setTimeout(resume, ms));

function once(target: EventTarget, name: string, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    target.addEventListener(name, () => resolve(), { once: true, signal });
    signal.addEventListener("abort", () => resolve(), { once: true });
  });
}

interface DrawingProps {
  source: Source;
  snapshot: Snapshot;
  shots: Shot[];
  time: number;
  rank: number;
  colour: Colour;
  withText: boolean;
}

const nameOf = (snapshot: Snapshot, layout: Layout, node: number): string => `${snapshot.created[node]}-${layout.start[node]}`;

function Drawing({ source, snapshot, shots, time, rank, colour, withText }: DrawingProps): VNode {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [focus, setFocus] = useState<string | null>(null); // nodes are kept by name: their numbers change
  const [chosen, setChosen] = useState<string | null>(null);
  const [size, setSize] = useState<Size>({ width: 0, height: 0 });
  const [dark, setDark] = useState(DARK.matches);
  const whole = useMemo(() => layOut(snapshot, null), [snapshot]);
  const numbers = useMemo(() => new Map(whole.shown.map((node) => [nameOf(snapshot, whole, node), node])), [whole]);
  const layout = useMemo(() => {
    const node = focus === null ? undefined : numbers.get(focus);
    return node === undefined ? whole : layOut(snapshot, node);
  }, [numbers, focus]);
  const node = chosen === null ? undefined : numbers.get(chosen);
  const text = useText(source, withText, node === undefined ? null : chosen);
  const ages = useMemo(() => agesOf(snapshot, shots, time, rank), [snapshot, time]);

  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setSize({ width: entry!.contentRect.width, height: entry!.contentRect.height }));
    watcher.observe(canvas.current!);
    return () => watcher.disconnect();
  }, []);
  useEffect(() => {
    const turn = (): void => setDark(DARK.matches);
    DARK.addEventListener("change", turn);
    return () => DARK.removeEventListener("change", turn);
  }, []);
  // A pointer that moves draws one frame after another: all nodes are painted once, and copied into each.
  const painted = useMemo(
    () => (size.width ? paint(canvas.current!, size, snapshot, layout, colour, dark) : undefined), [layout, size, colour, dark],
  );
  useEffect(() => {
    if (painted) show(canvas.current!, painted, node === undefined ? undefined : frameOf(snapshot, layout, node, size));
  }, [painted, node]);

  const at = (event: MouseEvent): number | undefined => {
    const box = canvas.current!.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, ((event.clientY - box.top) / box.height) * layout.leaves];
    return layout.shown.find((each) => {
      const [left, right] = edges(snapshot, layout, each, box.width);
      return x >= left && x < right && y >= layout.top[each]! && y < layout.top[each]! + layout.height[each]!;
    });
  };
  const choose = (next: number | undefined): void => setChosen(next === undefined ? null : nameOf(snapshot, layout, next));
  const steer = (event: KeyboardEvent): void => {
    const parent = node === undefined ? -1 : snapshot.parent[node]!;
    const row = parent < 0 ? layout.roots : layout.children[parent]!;
    const steps: Record<string, () => number | undefined> = {
      ArrowRight: () => (node === undefined ? layout.shown[0] : layout.children[node]![0] ?? node),
      ArrowLeft: () => (parent < 0 ? node : parent),
      ArrowDown: () => (node === undefined ? layout.shown[0] : row[row.indexOf(node) + 1] ?? node),
      ArrowUp: () => (node === undefined ? layout.shown[0] : row[row.indexOf(node) - 1] ?? node),
    };
    if (event.key in steps) choose(steps[event.key]!());
    else if (event.key === "Enter" && chosen !== null) setFocus(chosen);
    else if (event.key === "Escape") setFocus(null);
    else return;
    event.preventDefault();
  };
  const readers = useMemo(() => readersOf(snapshot), [snapshot]);
  const locked = snapshot.locks.filter((locks) => locks > 0).length;
  const largest = useMemo(() => [...whole.shown].sort((a, b) => snapshot.tokens[b]! - snapshot.tokens[a]!).slice(0, LISTED), [whole]);
  return (
    <>
      <dl class="figures">
        <Figure label="Nodes" value={nodesOf(snapshot)} note={`${locked} read now`} />
        <Figure label="Cached tokens" value={count(snapshot.cached_tokens)} />
        <Figure label="Held by requests" value={percent(snapshot.used_tokens / snapshot.total_tokens)} note={`of ${count(snapshot.total_tokens)} tokens`} />
        <Figure label="Lookups and insertions" value={count(snapshot.clock)} />
      </dl>
      <canvas
        ref={canvas} tabIndex={0} role="application" aria-roledescription="radix tree"
        aria-label={`Radix tree of ${snapshot.parent.length} nodes. Arrow keys move, Enter enlarges, Escape shows all.`}
        onMouseMove={(event) => choose(at(event))}
        onClick={(event) => { const next = at(event); if (next !== undefined) setFocus(nameOf(snapshot, layout, next)); }}
        onKeyDown={steer}
      />
      <div class="row">
        <p class="node" role="status">
          {node === undefined ? "Hover over a node, or move with the arrow keys." : (
            <>
              <b>{count(snapshot.tokens[node]!)} tokens</b> from {count(layout.start[node]!)}, {count(snapshot.hits[node]!)} hits,{" "}
              used {ages(node)}, {snapshot.locks[node]! > 0 ? "read by " : "not read now"}
              {snapshot.locks[node]! > 0 && <Readers locks={snapshot.locks[node]!} requests={readers[node]} />}
            </>
          )}
        </p>
        {focus !== null && <button type="button" class="small quiet" onClick={() => setFocus(null)}>Show all</button>}
      </div>
      {withText && text && <pre class="text" tabIndex={0} aria-label="Text of the node">{text}</pre>}
      <p class="legend"><span><i class={`mark-${colour}`} />{colour === "age" ? "recently used → least recently used" : "many hits → none"}</span><span><i class="mark-locked" />read by a request now</span></p>
      <details>
        <summary>Largest nodes as a table</summary>
        <div class="scroll" tabIndex={0} role="region" aria-label="Largest nodes">
          <table>
            <thead><tr><th>Start token</th><th>Tokens</th><th>Hits</th><th>Last used</th><th>Read by</th></tr></thead>
            <tbody>
              {largest.map((each) => (
                <tr key={each}>
                  <td>{whole.start[each]}</td><td>{snapshot.tokens[each]}</td><td>{snapshot.hits[each]}</td><td>{ages(each)}</td><td><Readers locks={snapshot.locks[each]!} requests={readers[each]} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </>
  );
}

/** How many are shown, and of how many if there are more: those used last are sent. */
function nodesOf({ parent: { length: shown }, nodes }: Snapshot): string {
  return nodes > shown ? `${shown.toLocaleString("en")} of ${nodes.toLocaleString("en")}` : shown.toLocaleString("en");
}

/** The requests that read each node. */
function readersOf(snapshot: Snapshot): number[][] {
  const readers: number[][] = [];
  for (const [request, last] of snapshot.readers) {
    for (let node = last; node >= 0; node = snapshot.parent[node]!) (readers[node] ??= []).push(request);
  }
  return readers;
}

/** How many read a node, and the first of them by name. Sessions and pinned prefixes lock nodes too, and have none. */
function Readers({ locks, requests = [] }: { locks: number; requests?: number[] }): VNode {
  const more = requests.length - NAMED;
  return (
    <>
      {count(locks)}{requests.length > 0 && ": "}
      {requests.slice(0, NAMED).map((request, index) => (
        <Fragment key={request}>{index > 0 && ", "}<a href={timelineOf(request)}>request {shortName(request)}</a></Fragment>
      ))}
      {more > 0 && ` and ${count(more)} more`}
    </>
  );
}

/** Numbers begin with that of the process which took the request. */
function shortName(request: number): string {
  const [taker, number] = [Math.floor(request / 2 ** 48), request % 2 ** 48];
  return taker ? `${taker}.${number}` : String(number);
}

/** The engine's clock counts lookups; when it passed a reading is known since this page has watched. */
function agesOf(snapshot: Snapshot, shots: Shot[], time: number, rank: number): (node: number) => string {
  const passed: [clock: number, time: number][] = [];
  for (const shot of shots.filter((each) => each.time <= time).reverse()) {
    const clock = shot.replicas[rank]?.clock ?? 0;
    if (passed.length && clock > passed[0]![0]) break; // of another engine: this one has started since
    passed.unshift([clock, shot.time]);
  }
  return (node) => {
    const used = snapshot.used[node]!;
    if (passed.length === 0 || used <= passed[0]![0]) return "before this page was opened";
    return `${duration(Math.max(0, time - passed.find(([clock]) => clock >= used)![1]))} ago`;
  };
}

function useText({ worker }: Source, wanted: boolean, name: string | null): string {
  const [text, setText] = useState("");
  const [keyed, setKeyed] = useState(0); // times that keys were given
  const refusal = useRef(""); // until then nothing more is asked for: the dialog would open with each node
  useEffect(() => {
    refusal.current = "";
  }, [wanted, keyed]);
  useEffect(() => {
    const again = (): void => setKeyed((times) => times + 1);
    window.addEventListener("bough-keys", again);
    return () => window.removeEventListener("bough-keys", again);
  }, []);
  useEffect(() => {
    setText(refusal.current);
    if (!wanted || name === null || refusal.current) return undefined;
    const stop = new AbortController();
    const timer = setTimeout(() => {
      json<{ text: string }>(worker ? `/ui/tree/${worker}/text/${name}` : `/ui/tree/text?node=${name}`, { access: "admin", signal: stop.signal }).then(
        (answer) => setText(answer.text),
        (error) => {
          if (stop.signal.aborted) return;
          if (error instanceof ApiError && error.wantsKey) refusal.current = messageOf(error);
          setText(messageOf(error));
        },
      );
    }, 150); // a pointer that passes over asks for nothing
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [wanted, name, keyed]);
  return text;
}

const edges = (snapshot: Snapshot, layout: Layout, node: number, width: number): [number, number] => [
  across(layout, layout.start[node]!, width),
  across(layout, layout.start[node]! + snapshot.tokens[node]!, width),
];

interface Size {
  width: number;
  height: number;
}

const DARK = matchMedia("(prefers-color-scheme: dark)");

type Frame = [x: number, y: number, width: number, height: number];

const SHADES = 32; // colours that are made once; one made for each node takes longer than its box

function frameOf(snapshot: Snapshot, layout: Layout, node: number, { width, height }: Size): Frame {
  const [left, right] = edges(snapshot, layout, node, width);
  const unit = height / layout.leaves;
  return [left, layout.top[node]! * unit, right - left, layout.height[node]! * unit];
}

/** All nodes, on a canvas of their own. */
function paint(
  shown: HTMLCanvasElement, size: Size, snapshot: Snapshot, layout: Layout, colour: Colour, dark: boolean,
): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(size.width * devicePixelRatio);
  canvas.height = Math.round(size.height * devicePixelRatio);
  const pen = canvas.getContext("2d")!;
  pen.scale(devicePixelRatio, devicePixelRatio);
  const style = getComputedStyle(shown);
  const [ink, mark] = [style.getPropertyValue("--text"), style.getPropertyValue("--locked")];
  const shades = Array.from({ length: SHADES + 1 }, (_, step) => {
    const fresh = step / SHADES;
    return `hsl(${230 - 90 * fresh} ${20 + 45 * fresh}% ${dark ? 22 + 16 * fresh : 88 - 22 * fresh}%)`;
  });
  const most = Math.log1p(snapshot.hits.reduce((a, b) => Math.max(a, b), 1));
  const oldest = snapshot.used.reduce((a, b) => Math.min(a, b), snapshot.clock);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (const node of layout.shown) {
    const [left, top, width, height] = frameOf(snapshot, layout, node, size);
    const fresh = colour === "hits" ? Math.log1p(snapshot.hits[node]!) / most
      : (snapshot.used[node]! - oldest) / Math.max(1, snapshot.clock - oldest);
    pen.fillStyle = shades[Math.round(fresh * SHADES)]!;
    pen.fillRect(left, top, Math.max(1, width - 1), Math.max(0.5, height - (height > 3 ? 1 : 0)));
    if (snapshot.locks[node]! > 0) {
      pen.fillStyle = mark;
      pen.fillRect(left, top, Math.max(1, width - 1), Math.max(1, Math.min(3, height)));
    }
    if (height > 13 && width > 42) {
      pen.fillStyle = ink;
      pen.fillText(String(snapshot.tokens[node]), left + 5, top + height / 2);
    }
  }
  return canvas;
}

function show(canvas: HTMLCanvasElement, painted: HTMLCanvasElement, chosen: Frame | undefined): void {
  if (canvas.width !== painted.width) canvas.width = painted.width;
  if (canvas.height !== painted.height) canvas.height = painted.height;
  const pen = canvas.getContext("2d")!;
  pen.resetTransform();
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(painted, 0, 0);
  if (!chosen) return;
  const [x, y, width, height] = chosen;
  pen.scale(devicePixelRatio, devicePixelRatio);
  pen.strokeStyle = getComputedStyle(canvas).getPropertyValue("--text");
  pen.lineWidth = 2;
  pen.strokeRect(x + 1, y + 1, Math.max(2, width - 3), Math.max(2, height - 2));
}
