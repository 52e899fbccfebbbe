// A conversation as a tree of turns: an edited question and a second answer are siblings, as in the engine's own tree.

export interface Stats {
  promptTokens: number;
  cachedTokens: number;
  outputTokens: number;
  firstTokenS: number;
  tokensPerS: number;
  finish: string;
}

export interface Turn {
  id: number;
  parent: number; // ROOT: the first turn
  role: "user" | "assistant";
  text: string;
  thinking: string;
  images: string[]; // data URLs
  busy: boolean;
  error: string;
  stats: Stats | null;
}

export const ROOT = -1;

export class Conversation {
  readonly turns: Turn[] = [];
  private readonly chosen = new Map<number, number>(); // by parent: which of its children is shown

  add(parent: number, role: Turn["role"], text = "", images: string[] = []): Turn {
    const turn: Turn = {
      id: this.turns.length, parent, role, text, images, thinking: "", busy: false, error: "", stats: null,
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
