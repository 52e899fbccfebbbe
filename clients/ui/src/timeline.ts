// What the engine recorded of its last steps and requests, gathered over several answers.

export interface Stage {
  name: string;
  start: number; // seconds of the engine's clock
  end: number;
  tokens: number;
}

export interface Request {
  id: number;
  start: number;
  end: number;
  prompt: number; // tokens
  cached: number;
  output: number;
  ended: boolean;
  finish: string; // empty: another process of the server has it, or it has not ended
  stages: Stage[];
}

export interface Step {
  number: number;
  phases: Stage[]; // of the CPU: plan, launch, wait, commit
  device: [number, number] | null;
  decodes: number;
  promptTokens: number;
}

type Times = [number, number, number, number, number, number, number, [number, number] | null, number, number];

export interface Answer {
  now: number;
  dp_rank?: number;
  found: number | null;
  steps: Times[];
  requests: {
    id: number; arrived: number; prompt: number; cached: number; output: number; ended: boolean; finish?: string;
    stages: [string, number, number][];
  }[];
}

const STEPS = 1024;
const REQUESTS = 256; // as many as the engine keeps
const OVERLAP_S = 2; // what a server process adds to a request may come after its end
const SHORTEST_S = 5e-5; // a stage without tokens that lasted no longer is left out

export class Recording {
  now = 0;
  found: number | null = null; // the request that was asked for
  steps: Step[] = [];
  requests: Request[] = []; // the latest first

  get since(): number {
    return Math.max(0, this.now - OVERLAP_S);
  }

  /** With what an answer brought. */
  with(answer: Answer): Recording {
    if (answer.now < this.now) return new Recording().with(answer); // another machine's clock
    const next = new Recording();
    next.now = answer.now;
    next.found = answer.found;
    const last = this.steps.at(-1)?.phases[0]!.start ?? -Infinity; // not its number: an engine that starts anew begins at 0
    next.steps = [...this.steps, ...answer.steps.filter(([, planned]) => planned > last).map(stepOf)].slice(-STEPS);
    const known = new Map(this.requests.map((request) => [request.id, request]));
    for (const each of answer.requests) known.set(each.id, requestOf(each));
    next.requests = [...known.values()].sort((a, b) => b.start - a.start).slice(0, REQUESTS);
    return next;
  }
}

function stepOf([number, plan, launch, launched, wait, commit, committed, device, decodes, promptTokens]: Times): Step {
  const phase = (name: string, start: number, end: number): Stage => ({ name, start, end, tokens: 0 });
  const phases = [phase("plan", plan, launch), phase("launch", launch, launched), phase("wait", wait, commit), phase("commit", commit, committed)];
  return { number, phases, device, decodes, promptTokens };
}

function requestOf({ arrived, stages, finish = "", ...rest }: Answer["requests"][number]): Request {
  let start = arrived;
  const found: Stage[] = [];
  for (const [name, end, tokens] of stages) {
    if (end - start >= SHORTEST_S || tokens) found.push({ name, start, end, tokens });
    start = Math.max(start, end);
  }
  return { ...rest, finish, start: arrived, end: start, stages: found };
}

export const endOf = (step: Step): number => step.phases.at(-1)!.end;
