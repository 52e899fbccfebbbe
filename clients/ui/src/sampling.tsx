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
  tools: string;
  tool_choice: string;
  model: string; // empty: the server's first
}

const EMPTY: Sampling = {
  system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "", stop: "", schema: "",
  tools: "", tool_choice: "auto", model: "",
};
const STORED = "bough-sampling";
const CHOICES = ["auto", "required", "none"];

/** Those of a side; the second begins with those of the first. */
export function storedSampling(side = ""): Sampling {
  try {
    return { ...EMPTY, ...JSON.parse(localStorage.getItem(STORED + side) ?? localStorage.getItem(STORED) ?? "{}") };
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
    const schema = parsed(sampling.schema, "The JSON schema is not JSON");
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (sampling.tools.trim()) {
    const tools = [parsed(sampling.tools, "The tools are not JSON")].flat() as Record<string, unknown>[];
    fields.tools = tools.map((tool) => ("function" in tool ? tool : { type: "function", function: tool }));
    fields.tool_choice = sampling.tool_choice;
  }
  return fields;
}

function parsed(text: string, problem: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${problem}: ${(error as Error).message}`);
  }
}

const NUMBERS: [keyof Sampling, string, string][] = [
  ["temperature", "Temperature", "model default"],
  ["top_p", "Top p", "1"],
  ["top_k", "Top k", "all"],
  ["min_p", "Min p", "0"],
  ["max_tokens", "Max tokens", "context length"],
  ["seed", "Seed", "random"],
];

interface FormProps {
  side: string;
  label: string;
  models: string[];
  onChange: (sampling: Sampling) => void;
}

export function SamplingForm({ side, label, models, onChange }: FormProps): VNode {
  const [sampling, setSampling] = useState(() => storedSampling(side));
  const change = (name: keyof Sampling) => (event: Event): void => {
    const next = { ...sampling, [name]: (event.target as HTMLInputElement).value };
    setSampling(next);
    localStorage.setItem(STORED + side, JSON.stringify(next));
    onChange(next);
  };
  const area = (name: keyof Sampling, caption: string, rows: number, hint: string): VNode => (
    <label>
      {caption}
      <textarea name={name} rows={rows} value={sampling[name]} placeholder={hint} spellcheck={false} onInput={change(name)} />
    </label>
  );
  const choice = (name: keyof Sampling, caption: string, options: string[], value: string): VNode => (
    <label>
      {caption}
      <select name={name} value={value} onChange={change(name)}>{options.map((option) => <option key={option}>{option}</option>)}</select>
    </label>
  );
  return (
    <form class="sampling" aria-label={label} onSubmit={(event) => event.preventDefault()}>
      {models.length > 1 && choice("model", "Model", models, models.includes(sampling.model) ? sampling.model : models[0]!)}
      {area("system", "System prompt", 4, "none")}
      <div class="grid">
        {NUMBERS.map(([name, label, hint]) => (
          <label key={name}>
            {label}
            <input name={name} inputMode="decimal" value={sampling[name]} placeholder={hint} onInput={change(name)} />
          </label>
        ))}
      </div>
      {area("stop", "Stop strings, one per line", 2, "none")}
      {area("schema", "JSON schema", 5, '{"type": "object", …}')}
      {area("tools", "Tools (JSON)", 5, '[{"name": "weather", "parameters": {…}}]')}
      {sampling.tools.trim() && choice("tool_choice", "Tool choice", CHOICES, sampling.tool_choice)}
    </form>
  );
}
