// An answer, as it comes from the server.
import { call, events, messageOf } from "./api";
import type { Conversation, ToolCall, Turn } from "./conversation";
import { requestFields, type Sampling } from "./sampling";

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string | null; function?: { name?: string | null; arguments?: string | null } }[] | null;
}

interface Chunk {
  id?: string;
  choices: { delta: Delta; finish_reason: string | null }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } | null } | null;
  error?: { message: string };
}

interface Sent {
  role: string;
  content: string | null | { type: string; text?: string; image_url?: { url: string } }[];
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
}

/** Fills a turn; what goes wrong becomes part of it. */
export async function generate(
  conversation: Conversation, turn: Turn, model: string, sampling: Sampling, signal: AbortSignal, redraw: () => void,
): Promise<void> {
  const began = performance.now();
  let first = 0;
  let finish = "";
  try {
    const messages = conversation.before(turn).map(messageOfTurn);
    if (sampling.system) messages.unshift({ role: "system", content: sampling.system });
    const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...requestFields(sampling) };
    const response = await call("/v1/chat/completions", { body, signal });
    turn.requestId = response.headers.get("x-request-id") ?? "";
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk: Chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      turn.rid ||= chunk.id ?? "";
      const choice = chunk.choices[0];
      if (choice) {
        if (add(turn, choice.delta)) first ||= performance.now();
        finish = choice.finish_reason ?? finish;
      }
      if (chunk.usage) {
        const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
        turn.stats = {
          promptTokens: prompt_tokens,
          cachedTokens: prompt_tokens_details?.cached_tokens ?? 0,
          outputTokens: completion_tokens,
          firstTokenS: ((first || performance.now()) - began) / 1000, // an answer may be empty
          tokensPerS: ((completion_tokens - 1) * 1000) / (performance.now() - first),
          finish,
        };
      }
      redraw();
    }
  } catch (error) {
    turn.error = signal.aborted ? "Stopped." : messageOf(error);
  }
}

/** Whether it brought anything. */
function add(turn: Turn, { content, reasoning_content, tool_calls }: Delta): boolean {
  turn.text += content ?? "";
  turn.thinking += reasoning_content ?? "";
  for (const part of tool_calls ?? []) {
    const known: ToolCall = (turn.calls[part.index] ??= { id: "", name: "", arguments: "" });
    known.id ||= part.id ?? "";
    known.name += part.function?.name ?? "";
    known.arguments += part.function?.arguments ?? "";
  }
  return Boolean(content || reasoning_content || tool_calls?.length);
}

function messageOfTurn(turn: Turn): Sent {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.callId, content: turn.text };
  if (turn.calls.length) {
    const calls = turn.calls.map(({ id, ...made }) => ({ id, type: "function" as const, function: made }));
    return { role: turn.role, content: turn.text || null, tool_calls: calls };
  }
  if (!turn.images.length) return { role: turn.role, content: turn.text };
  const images = turn.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: turn.role, content: [...images, { type: "text", text: turn.text }] };
}
