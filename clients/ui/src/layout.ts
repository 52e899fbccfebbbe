// Where the nodes of a snapshot stand: along the tokens from left to right, each leaf as high as any other.

/** Columns with a figure of each node; parents come before their children. */
export interface Snapshot {
  dp_rank?: number;
  clock: number;
  nodes: number; // of the whole tree
  cached_tokens: number;
  used_tokens: number;
  total_tokens: number;
  parent: number[];
  tokens: number[];
  created: number[];
  used: number[];
  hits: number[];
  locks: number[];
  readers: [request: number, last: number][]; // each with the last node that it has locked, with all above; -1: none
}

export interface Layout {
  start: Int32Array; // position of the first token
  top: Float64Array; // in leaves
  height: Float64Array;
  children: number[][];
  roots: number[];
  shown: number[]; // below the node that was chosen, with itself; parents first
  from: number; // positions of the first and last token that are shown
  to: number;
  leaves: number;
}

export function layOut(shot: Snapshot, focus: number | null): Layout {
  const n = shot.parent.length;
  const start = new Int32Array(n);
  const top = new Float64Array(n);
  const height = new Float64Array(n);
  const children: number[][] = Array.from({ length: n }, () => []);
  const roots: number[] = [];
  for (let i = 0; i < n; i++) {
    const parent = shot.parent[i]!;
    if (parent >= 0) start[i] = start[parent]! + shot.tokens[parent]!;
    (parent < 0 ? roots : children[parent]!).push(i);
  }
  for (let i = n - 1; i >= 0; i--) {
    height[i] ||= 1;
    const parent = shot.parent[i]!;
    if (parent >= 0) height[parent]! += height[i]!;
  }
  // In the order in which they came, so that nothing moves when another branch is used.
  const byAge = (a: number, b: number): number => shot.created[a]! - shot.created[b]!;
  const begin = focus === null ? roots.sort(byAge) : [focus];
  const shown: number[] = [];
  let leaves = 0;
  let to = 1;
  for (const node of begin) {
    top[node] = leaves;
    leaves += height[node]!;
    const stack = [node];
    for (let next = stack.pop(); next !== undefined; next = stack.pop()) {
      shown.push(next);
      to = Math.max(to, start[next]! + shot.tokens[next]!);
      let y = top[next]!;
      for (const child of children[next]!.sort(byAge)) {
        top[child] = y;
        y += height[child]!;
        stack.push(child);
      }
    }
  }
  return { start, top, height, children, roots, shown, from: focus === null ? 0 : start[focus]!, to, leaves: Math.max(1, leaves) };
}

/** Long prompts must not make short ones invisible: widths follow the root of the position. */
export function across(layout: Layout, position: number, width: number): number {
  return width * Math.sqrt(Math.max(0, position - layout.from) / Math.max(1, layout.to - layout.from));
}
