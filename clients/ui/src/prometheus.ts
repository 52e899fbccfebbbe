// Prometheus' text format, as far as this page reads it: samples by name, without the engine's prefix.

export interface Sample {
  labels: Record<string, string>;
  value: number;
}

export interface Bucket {
  upTo: number;
  count: number;
}

export class Page {
  private readonly samples = new Map<string, Sample[]>();

  constructor(text: string, readonly time: number) {
    for (const line of text.split("\n")) {
      const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
      if (!found) continue;
      const labels: Record<string, string> = {};
      for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name!] = value!;
      const name = found[1]!.replace(/^(?:\w+:|bough_gateway_)/, "");
      const sample = { labels, value: Number(found[3]) };
      const known = this.samples.get(name);
      if (known) known.push(sample);
      else this.samples.set(name, [sample]);
    }
  }

  all(name: string): Sample[] {
    return this.samples.get(name) ?? [];
  }

  /** The sum over all labels; NaN where there is no such metric. */
  sum(name: string, wanted: (labels: Sample["labels"]) => boolean = () => true): number {
    const found = this.all(name).filter((sample) => wanted(sample.labels));
    return found.length || this.all(name).length ? found.reduce((total, sample) => total + sample.value, 0) : NaN;
  }

  mean(name: string): number {
    return this.sum(name) / this.all(name).length;
  }

  /** What fell between two bounds, over all labels; bounds at both ends where nothing did are left out. */
  histogram(name: string): Bucket[] {
    const upTo = new Map<number, number>();
    for (const { labels, value } of this.all(`${name}_bucket`)) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      upTo.set(bound, (upTo.get(bound) ?? 0) + value);
    }
    const sums = [...upTo].sort(([a], [b]) => a - b);
    const buckets = sums.map(([bound, sum], index) => ({ upTo: bound, count: sum - (sums[index - 1]?.[1] ?? 0) }));
    const first = buckets.findIndex((bucket) => bucket.count > 0);
    const last = buckets.findLastIndex((bucket) => bucket.count > 0);
    return first < 0 ? [] : buckets.slice(first, last + 1);
  }
}

/** The bound below which a share of all values lie. */
export function quantile(buckets: Bucket[], share: number): number {
  const total = buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  let below = 0;
  for (const bucket of buckets) {
    below += bucket.count;
    if (below >= share * total && total > 0) return bucket.upTo;
  }
  return NaN;
}
