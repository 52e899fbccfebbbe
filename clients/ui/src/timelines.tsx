// Where time goes: each request from its arrival to its end, and the steps with what the CPU and the device did.
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { json } from "./api";
import { count, duration, percent } from "./format";
import { usePolling } from "./polling";
import { type Answer, endOf, Recording, type Request, type Stage, type Step } from "./timeline";
import { hasNoPage, NO_PAGE, type Source } from "./worker";

const EVERY_MS = 1000;
const LISTED = 30;
const WINDOWS_S = [2, 10, 60];
const WIDTH = 1000; // of a drawing, whose units are those of its viewBox
const ABOUT: Record<string, string> = {
  tokenise: "read, rendered and tokenised", "hand over": "on its way to the scheduler", queued: "waited for a row",
  grammar: "waited for its grammar", fetch: "waited for another engine or a store", prefill: "prompt computed",
  decode: "tokens generated", retracted: "retracted, waited again", detokenise: "last text made and brought",
};
const PHASES = ["plan", "launch", "wait", "commit"];

interface Span {
  from: number;
  to: number;
}

/** The view of a request that the engine knows by this number. */
export const timelineOf = (request: number): string => `#timelines/${NUMBERED}${request}`;
const NUMBERED = "@";

/** `rid` is the id of an answer whose request is to be shown, or the engine's number of a request. */
export function Timelines({ rid, source }: { rid: string; source: Source }): VNode {
  const [replicas, setReplicas] = useState<Recording[]>([]);
  const [paused, setPaused] = useState(false);
  const [windowS, setWindowS] = useState(10);
  const [rank, setRank] = useState(0);
  const [chosen, setChosen] = useState<number | null>(null);
  const [told, setTold] = useState(true);
  const held = useRef(paused);
  held.current = paused;
  const latest = useRef(replicas);
  latest.current = replicas;

  const problem = usePolling(EVERY_MS, async (signal) => {
    if (held.current && latest.current.length) return;
    const since = Math.min(...latest.current.map((each) => each.since));
    const from = (Number.isFinite(since) ? since : 0).toFixed(6);
    const named = rid && !rid.startsWith(NUMBERED) ? `/${encodeURIComponent(rid)}` : "";
    const path = source.worker ? `/ui/timeline/${source.worker}/${from}${named}` : `/ui/timeline?${new URLSearchParams({ since: from, rid })}`;
    const answer = await json<{ replicas: Answer[] }>(path, { access: source.access, signal }).catch((error: unknown) => {
      if (!source.worker || !hasNoPage(error)) throw error;
      return null;
    });
    setTold(Boolean(answer?.replicas));
    if (!answer?.replicas) return;
    const next = answer.replicas.map((each, index) => (latest.current[index] ?? new Recording()).with(each));
    const home = next.findIndex((each) => foundIn(each, rid) !== null);
    if (home >= 0) setRank(home);
    setReplicas(next);
  }, rid);
  useEffect(() => setChosen(null), [rid]);

  const recording = replicas[Math.min(rank, replicas.length - 1)];
  const shown = chosen ?? (recording ? foundIn(recording, rid) : null);
  const request = recording?.requests.find(({ id }) => id === shown);
  return (
    <section class="timelines" aria-label="Timelines">
      <div class="row controls">
        <button type="button" aria-pressed={paused} onClick={() => setPaused(!paused)}>{paused ? "Resume" : "Pause"}</button>
        <label>
          Steps over the last
          <select value={windowS} onChange={(event) => setWindowS(Number((event.target as HTMLSelectElement).value))}>
            {WINDOWS_S.map((seconds) => <option key={seconds} value={seconds}>{seconds} s</option>)}
          </select>
        </label>
        {replicas.length > 1 && (
          <label>
            Replica
            <select value={rank} onChange={(event) => setRank(Number((event.target as HTMLSelectElement).value))}>
              {replicas.map((_, index) => <option key={index} value={index}>{index}</option>)}
            </select>
          </label>
        )}
        {request && <button type="button" class="quiet" onClick={() => { setChosen(null); location.hash = "timelines"; }}>All requests</button>}
      </div>
      {problem && <p class="error" role="alert">{problem}</p>}
      {!told ? <p class="hint">{NO_PAGE}</p> : !recording ? !problem && <p class="hint">Reading what was recorded …</p> : (
        <>
          {rid && foundIn(recording, rid) === null && <p class="hint">The request is not among the last that the server keeps.</p>}
          {request ? <OneRequest request={request} /> : <Requests recording={recording} onChoose={setChosen} />}
          <Steps
            steps={recording.steps}
            span={request ? { from: request.start, to: request.end } : { from: recording.now - windowS, to: recording.now }}
            about={request ? "during the request" : `over the last ${windowS} s`}
          />
        </>
      )}
    </section>
  );
}

function foundIn(recording: Recording, rid: string): number | null {
  if (!rid.startsWith(NUMBERED)) return rid ? recording.found : null;
  return recording.requests.find(({ id }) => id === Number(rid.slice(NUMBERED.length)))?.id ?? null;
}

const across = ({ from, to }: Span, time: number): number =>
  Math.round(Math.min(1, Math.max(0, (time - from) / Math.max(1e-6, to - from))) * WIDTH * 100) / 100;

/** One path for all spans of a kind: thousands of them cost no more than their text. */
function outline(span: Span, stages: { start: number; end: number }[], top: number, height: number): string {
  return stages.filter(({ start, end }) => end > span.from && start < span.to).map(({ start, end }) => {
    const left = across(span, start);
    return `M${left} ${top}H${Math.max(left + 0.8, across(span, end))}V${top + height}H${left}Z`;
  }).join("");
}

const byName = (stages: Stage[]): Map<string, Stage[]> => Map.groupBy(stages, ({ name }) => name);

function StageBar({ stages, span }: { stages: Stage[]; span: Span }): VNode {
  return (
    <svg class="bar" viewBox={`0 0 ${WIDTH} 10`} preserveAspectRatio="none" aria-hidden="true">
      {[...byName(stages)].map(([name, of]) => <path key={name} class={`stage-${name.replace(" ", "-")}`} d={outline(span, of, 0, 10)} />)}
    </svg>
  );
}

function Legend({ names }: { names: string[] }): VNode {
  return <p class="legend">{names.map((name) => <span key={name}><i class={`stage-${name.replace(" ", "-")}`} />{name}</span>)}</p>;
}

const sumUp = (request: Request): string =>
  `${duration(request.end - request.start)}, ${count(request.prompt)} prompt tokens (${count(request.cached)} cached), ${count(request.output)} generated`;

function Requests({ recording, onChoose }: { recording: Recording; onChoose: (id: number) => void }): VNode {
  const listed = recording.requests.slice(0, LISTED);
  if (!listed.length) return <p class="hint">No requests yet.</p>;
  const span = { from: Math.min(...listed.map(({ start }) => start)), to: recording.now };
  return (
    <>
      <h2>Recent requests, over {duration(span.to - span.from)}</h2>
      <ul class="requests">
        {listed.map((request) => (
          <li key={request.id}>
            <button type="button" class="quiet" onClick={() => onChoose(request.id)}>
              <span>{request.ended ? request.finish || "ended" : request.stages.at(-1)?.name ?? "arrived"}</span>
              <span class="hint">{sumUp(request)}</span>
              <StageBar stages={request.stages} span={span} />
            </button>
          </li>
        ))}
      </ul>
      <Legend names={Object.keys(ABOUT)} />
    </>
  );
}

function OneRequest({ request }: { request: Request }): VNode {
  const whole = request.end - request.start;
  return (
    <>
      <h2>{request.ended ? "Request" : "Running request"}: {sumUp(request)}{request.finish && `, finish reason: ${request.finish}`}</h2>
      <StageBar stages={request.stages} span={{ from: request.start, to: request.end }} />
      <div class="scroll" tabIndex={0} role="region" aria-label="Stages of the request">
        <table>
          <thead><tr><th>Stage</th><th>What happened</th><th>Start</th><th>Duration</th><th>Share</th><th>Tokens</th></tr></thead>
          <tbody>
            {request.stages.map((stage, index) => (
              <tr key={index}>
                <th scope="row"><i class={`swatch stage-${stage.name.replace(" ", "-")}`} />{stage.name}</th><td>{ABOUT[stage.name] ?? ""}</td>
                <td>{duration(stage.start - request.start)}</td><td>{duration(stage.end - stage.start)}</td>
                <td>{percent((stage.end - stage.start) / whole)}</td><td>{stage.tokens || ""}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

function Steps({ steps, span, about }: { steps: Step[]; span: Span; about: string }): VNode {
  const [chosen, setChosen] = useState<number | null>(null);
  const inside = steps.filter((step) => endOf(step) > span.from && step.phases[0]!.start < span.to);
  const at = chosen === null ? -1 : inside.findIndex(({ number }) => number === chosen);
  const step = inside[at];
  const device = inside.flatMap(({ device: ran }) => (ran ? [{ start: ran[0], end: ran[1] }] : []));
  const busy = device.reduce((sum, { start, end }) => sum + Math.max(0, Math.min(end, span.to) - Math.max(start, span.from)), 0);
  const phases = byName(inside.flatMap((each) => each.phases));
  const select = (event: MouseEvent): void => {
    const box = (event.currentTarget as SVGElement).getBoundingClientRect();
    const time = span.from + ((event.clientX - box.left) / box.width) * (span.to - span.from);
    const lower = event.clientY - box.top > box.height / 2;
    const near = lower ? inside.find(({ device: ran }) => ran && ran[1] >= time) : inside.find((each) => endOf(each) >= time);
    setChosen(near?.number ?? null);
  };
  const steer = (event: KeyboardEvent): void => {
    const moves: Record<string, number> = { ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(inside.length - 1, at + 1), Home: 0, End: inside.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    setChosen(inside[moves[event.key]!]?.number ?? null);
  };
  return (
    <>
      <h2>Steps {about}: {count(inside.length)}, device busy {percent(busy / Math.max(1e-6, span.to - span.from))}</h2>
      <div class="lanes">
        <span>CPU</span><span>Device</span>
        <svg
          viewBox={`0 0 ${WIDTH} 44`} preserveAspectRatio="none" tabindex={0} role="application" aria-roledescription="step timeline"
          aria-label={`${inside.length} steps. Left and right move from step to step.`} onClick={select} onKeyDown={steer}
        >
          {step && <path class="chosen" d={outline(span, [{ start: step.phases[0]!.start, end: endOf(step) }], 0, 44)} />}
          {PHASES.map((name) => <path key={name} class={`stage-${name}`} d={outline(span, phases.get(name) ?? [], 2, 18)} />)}
          <path class="stage-device" d={outline(span, device, 24, 18)} />
        </svg>
      </div>
      <p class="step" role="status">
        {!step ? "Click on a step, or move with the arrow keys." : (
          <>
            <b>Step {step.number}</b>: {step.decodes} decodes, {step.promptTokens} prompt tokens; {step.device ? `device ${duration(step.device[1] - step.device[0])}` : "device unknown"},{" "}
            {step.phases.map(({ name, start, end }) => `${name} ${duration(end - start)}`).join(", ")}
          </>
        )}
      </p>
      <Legend names={[...PHASES, "device"]} />
    </>
  );
}
