// Small charts as SVG; each says in words what it shows.
import type { VNode } from "preact";
import { count, duration } from "./format";
import { type Bucket, quantile } from "./prometheus";

export interface Series {
  label: string;
  values: number[];
}

export function Lines({ title, series, show = count, top }: {
  title: string; series: Series[]; show?: (value: number) => string; top?: number;
}): VNode {
  const highest = top ?? Math.max(1, ...series.flatMap(({ values }) => values.filter(Number.isFinite)));
  const last = series.map(({ label, values }) => `${label} ${show(values.at(-1) ?? NaN)}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>{title}</figcaption>
      <svg viewBox="0 0 120 40" preserveAspectRatio="none" role="img" aria-label={`${title}: ${last}`}>
        {series.map(({ values }, index) => {
          const span = Math.max(values.length, 15) - 1; // the latest stands at the right end
          const points = values.flatMap((value, i) =>
            Number.isFinite(value) ? [`${120 - (120 * (values.length - 1 - i)) / span},${39 - (38 * value) / highest}`] : []);
          return <polyline key={index} class={`line-${index}`} points={points.join(" ")} vector-effect="non-scaling-stroke" />;
        })}
      </svg>
      <p class="legend">
        {series.map(({ label, values }, index) => (
          <span key={index}><i class={`mark-${index}`} />{label} <b>{show(values.at(-1) ?? NaN)}</b></span>
        ))}
        <span class="hint">max {show(highest)}</span>
      </p>
    </figure>
  );
}

export function Bars({ title, buckets }: { title: string; buckets: Bucket[] }): VNode {
  const highest = Math.max(1, ...buckets.map((bucket) => bucket.count));
  const total = buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  const [middle, late] = [quantile(buckets, 0.5), quantile(buckets, 0.99)].map((value) => duration(value));
  return (
    <figure class="chart">
      <figcaption>{title}</figcaption>
      <svg viewBox="0 0 120 40" preserveAspectRatio="none" role="img"
        aria-label={`${title}: ${total} values, p50 up to ${middle}, p99 up to ${late}`}>
        {buckets.map((bucket, index) => {
          const width = 120 / Math.max(buckets.length, 6);
          const height = (38 * bucket.count) / highest;
          return (
            <rect key={index} x={index * width + 0.4} y={39 - height} width={width - 0.8} height={height}>
              <title>{`up to ${duration(bucket.upTo)}: ${bucket.count}`}</title>
            </rect>
          );
        })}
      </svg>
      <p class="legend">
        {total === 0 ? <span>no data yet</span> : <><span>p50 ≤ <b>{middle}</b></span><span>p99 ≤ <b>{late}</b></span><span class="hint">{count(total)} total</span></>}
      </p>
    </figure>
  );
}

export function Figure({ label, value, note }: { label: string; value: string; note?: string }): VNode {
  return <div class="figure"><dt>{label}</dt><dd>{value}{note && <small> {note}</small>}</dd></div>;
}
