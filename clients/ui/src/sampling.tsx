// The system prompt and how answers are sampled; kept in this browser.
import type { VNode } from "preact";
import { useState } from "preact/hooks";

export interface Sampling {
  system: string;
  temperature: string;
  top_p: string;
  top_k: string;
  min_p: string;
  max_tokens: string;
  seed: string;
  stop: string;
  schema: string;
}

const EMPTY: Sampling = {
  system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "", stop: "", schema: "",
};
const STORED = "bough-sampling";

export function storedSampling(): Sampling {
  try {
    return { ...EMPTY, ...JSON.parse(localStorage.getItem(STORED) ?? "{}") };
  } catch {
    return EMPTY; // somebody else's value
  }
}

/** The fields of a request. Throws where a value cannot be sent. */
export function requestFields(sampling: Sampling): Record<string, unknown> {
  const fields: Record<string, unknown> = {};
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"] as const) {
    if (sampling[name].trim() === "") continue;
    const value = Number(sampling[name]);
    if (!Number.isFinite(value)) throw new Error(`${name} must be a number, got ${sampling[name]}.`);
    fields[name] = value;
  }
  if (sampling.stop) fields.stop = sampling.stop.split("\n").filter(Boolean);
  if (sampling.schema.trim()) {
    let schema: unknown;
    try {
      schema = JSON.parse(sampling.schema);
    } catch (error) {
      throw new Error(`The JSON schema is not JSON: ${(error as Error).message}`);
    }
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return fields;
}

const NUMBERS: [keyof Sampling, string, string][] = [
  ["temperature", "Temperature", "the model's"],
  ["top_p", "Top p", "1"],
  ["top_k", "Top k", "all"],
  ["min_p", "Min p", "0"],
  ["max_tokens", "Most tokens", "the context"],
  ["seed", "Seed", "random"],
];

export function SamplingForm({ onChange }: { onChange: (sampling: Sampling) => void }): VNode {
  const [sampling, setSampling] = useState(storedSampling);
  const change = (name: keyof Sampling) => (event: Event): void => {
    const next = { ...sampling, [name]: (event.target as HTMLInputElement).value };
    setSampling(next);
    localStorage.setItem(STORED, JSON.stringify(next));
    onChange(next);
  };
  const area = (name: keyof Sampling, label: string, rows: number, hint: string): VNode => (
    <label>
      {label}
      <textarea name={name} rows={rows} value={sampling[name]} placeholder={hint} spellcheck={false} onInput={change(name)} />
    </label>
  );
  return (
    <form class="sampling" aria-label="Settings of answers" onSubmit={(event) => event.preventDefault()}>
      {area("system", "System prompt", 4, "none")}
      <div class="grid">
        {NUMBERS.map(([name, label, hint]) => (
          <label key={name}>
            {label}
            <input name={name} inputMode="decimal" value={sampling[name]} placeholder={hint} onInput={change(name)} />
          </label>
        ))}
      </div>
      {area("stop", "Stop at, one on a line", 2, "nothing")}
      {area("schema", "JSON schema of the answer", 5, '{"type": "object", …}')}
    </form>
  );
}
