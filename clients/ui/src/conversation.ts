// A conversation as a tree of turns: an edited question and a second answer are siblings, as in the engine's own tree.

export interface Stats {
  promptTokens: number;
  cachedTokens: number;
  outputTokens: number;
  firstTokenS: number;
  tokensPerS: number;
  finish: string;
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Turn {
  id: number;
  parent: number; // ROOT: the first turn
  role: "user" | "assistant" | "tool";
  text: string;
  thinking: string;
  images: string[]; // data URLs
  calls: ToolCall[]; // that the model made
  callId: string; // of a tool's result: the call that it answers
  rid: string; // of an answer: its request
  requestId: string; // of an answer: as a gateway's routing decisions name it
  worker: string | null; // of an answer, on a gateway's page: who has its timeline; empty: nobody; null: not known yet
  busy: boolean;
  error: string;
  stats: Stats | null;
}

export const ROOT = -1;

export class Conversation {
  readonly turns: Turn[] = [];
  private readonly chosen = new Map<number, number>(); // by parent: which of its children is shown

  /** Another with the same turns, which goes its own way from here. */
  copy(): Conversation {
    const made = new Conversation();
    made.turns.push(...this.turns.map((turn) => ({ ...turn, busy: false })));
    for (const [parent, child] of this.chosen) made.chosen.set(parent, child);
    return made;
  }

  add(parent: number, role: Turn["role"], text = "", images: string[] = [], callId = ""): Turn {
    const turn: Turn = {
      id: this.turns.length, parent, role, text, images, callId, calls: [], rid: "", requestId: "", worker: null, thinking: "",
      busy: false, error: "", stats: null,
    };
    this.turns.push(turn);
    this.chosen.set(parent, turn.id);
    return turn;
  }

  siblings(turn: Turn): Turn[] {
    return this.turns.filter((other) => other.parent === turn.parent);
  }

  choose(turn: Turn): void {
    this.chosen.set(turn.parent, turn.id);
  }

  /** The turns of the branch that is shown, from the first. */
  get shown(): Turn[] {
    const path: Turn[] = [];
    for (let next = this.chosen.get(ROOT); next !== undefined; next = this.chosen.get(next)) path.push(this.turns[next]!);
    return path;
  }

  /** The turns above one, from the first. */
  before(turn: Turn): Turn[] {
    const path: Turn[] = [];
    for (let next = turn.parent; next !== ROOT; next = this.turns[next]!.parent) path.unshift(this.turns[next]!);
    return path;
  }
}
