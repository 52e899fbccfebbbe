// Chat: answers as they come, branches, and what each cost.
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { call, events, json, messageOf } from "./api";
import { Conversation, ROOT, type Turn } from "./conversation";
import { count, duration, percent } from "./format";
import { Markdown } from "./markdown";
import { requestFields, type Sampling, SamplingForm, storedSampling } from "./sampling";

const conversations = { now: new Conversation() }; // outlives a look at another view
let running: AbortController | null = null;
let redraw = (): void => undefined; // of the view, while it is shown
let sampling: Sampling = storedSampling();

export function Chat(): VNode {
  const [, setTick] = useState(0);
  const [model, setModel] = useState("");
  const [seesImages, setSeesImages] = useState(false);
  const [status, setStatus] = useState("");
  const log = useRef<HTMLDivElement>(null);
  const conversation = conversations.now;

  useEffect(() => {
    let frame = 0;
    redraw = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        const place = log.current;
        const follow = place !== null && place.scrollHeight - place.scrollTop - place.clientHeight < 80;
        setTick((tick) => tick + 1);
        if (follow) requestAnimationFrame(() => place.scrollTo(0, place.scrollHeight));
      });
    };
    const ask = (): void => {
      void describeModel().then(([name, images]) => {
        setModel(name);
        setSeesImages(images);
      }, (error) => setStatus(messageOf(error)));
    };
    ask();
    window.addEventListener("bough-keys", ask);
    return () => {
      window.removeEventListener("bough-keys", ask);
      cancelAnimationFrame(frame);
      redraw = () => undefined;
    };
  }, []);

  const answer = async (question: Turn): Promise<void> => {
    setStatus("The answer begins.");
    const turn = conversation.add(question.id, "assistant");
    await generate(conversation, turn, model);
    const stats = turn.stats;
    setStatus(turn.error || `The answer is complete: ${stats ? count(stats.outputTokens) : "no"} tokens.`);
  };
  const ask = (parent: number, text: string, images: string[]): void => {
    void answer(conversation.add(parent, "user", text, images));
  };
  const shown = conversation.shown;
  return (
    <div class="chat">
      <section class="talk" aria-label="Conversation">
        <div class="log" ref={log} role="log" aria-live="off" tabIndex={0} aria-label="Messages">
          {shown.length === 0 && (
            <p class="hint">
              {model ? <>Talk to <b>{model}</b>.</> : "No model yet."} What branches share is computed once: edit a question or
              ask for another answer, and see how many tokens were cached.
            </p>
          )}
          {shown.map((turn) => (
            <Message key={turn.id} turn={turn} conversation={conversation} onAsk={ask} onAgain={answer} />
          ))}
        </div>
        <p role="status" class="visually-hidden">{status}</p>
        <Composer
          images={seesImages}
          busy={running !== null}
          onSend={(text, images) => ask(shown.at(-1)?.id ?? ROOT, text, images)}
          onNew={() => {
            running?.abort();
            conversations.now = new Conversation();
            redraw();
          }}
        />
      </section>
      <details class="panel" open={matchMedia("(min-width: 60rem)").matches}>
        <summary>Settings</summary>
        <SamplingForm onChange={(next) => (sampling = next)} />
      </details>
    </div>
  );
}

async function describeModel(): Promise<[string, boolean]> {
  const models = await json<{ data: { id: string }[] }>("/v1/models");
  const name = models.data[0]?.id ?? "";
  // Behind a gateway there may be engines of other kinds, which do not tell.
  const known = await json<{ capabilities?: string[] }>("/api/show", { body: { model: name } }).catch(() => null);
  return [name, known?.capabilities?.includes("vision") ?? false];
}

interface Chunk {
  choices: { delta: { content?: string | null; reasoning_content?: string | null }; finish_reason: string | null }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } | null } | null;
  error?: { message: string };
}

async function generate(conversation: Conversation, turn: Turn, model: string): Promise<void> {
  const control = new AbortController();
  running = control;
  turn.busy = true;
  redraw();
  const began = performance.now();
  let first = 0;
  let finish = "";
  try {
    const messages = conversation.before(turn).map(messageOfTurn);
    if (sampling.system) messages.unshift({ role: "system", content: sampling.system });
    const body = {
      model, messages, stream: true, stream_options: { include_usage: true }, ...requestFields(sampling),
    };
    for await (const data of events(await call("/v1/chat/completions", { body, signal: control.signal }))) {
      if (data === "[DONE]") break;
      const chunk: Chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (choice?.delta.content || choice?.delta.reasoning_content) first ||= performance.now();
      turn.text += choice?.delta.content ?? "";
      turn.thinking += choice?.delta.reasoning_content ?? "";
      finish = choice?.finish_reason ?? finish;
      if (chunk.usage) {
        const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
        turn.stats = {
          promptTokens: prompt_tokens,
          cachedTokens: prompt_tokens_details?.cached_tokens ?? 0,
          outputTokens: completion_tokens,
          firstTokenS: (first - began) / 1000,
          tokensPerS: ((completion_tokens - 1) * 1000) / (performance.now() - first),
          finish,
        };
      }
      redraw();
    }
  } catch (error) {
    turn.error = control.signal.aborted ? "Stopped." : messageOf(error);
  } finally {
    turn.busy = false;
    if (running === control) running = null;
    redraw();
  }
}

interface Sent {
  role: string;
  content: string | { type: string; text?: string; image_url?: { url: string } }[];
}

function messageOfTurn(turn: Turn): Sent {
  if (!turn.images.length) return { role: turn.role, content: turn.text };
  const images = turn.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: turn.role, content: [...images, { type: "text", text: turn.text }] };
}

interface MessageProps {
  turn: Turn;
  conversation: Conversation;
  onAsk: (parent: number, text: string, images: string[]) => void;
  onAgain: (question: Turn) => void;
}

function Message({ turn, conversation, onAsk, onAgain }: MessageProps): VNode {
  const [editing, setEditing] = useState(false);
  const edited = useRef<HTMLTextAreaElement>(null);
  const siblings = conversation.siblings(turn);
  const place = siblings.indexOf(turn);
  const show = (step: number) => (): void => {
    conversation.choose(siblings[place + step]!);
    redraw();
  };
  const mine = turn.role === "user";
  const idle = running === null;
  return (
    <article class={`message ${turn.role}`} aria-label={mine ? "You" : "The model"} aria-busy={turn.busy}>
      {turn.images.map((url, index) => <img key={index} src={url} alt={`attached image ${index + 1}`} />)}
      {turn.thinking && <details><summary>Thinking</summary><Markdown text={turn.thinking} /></details>}
      {editing ? (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            setEditing(false);
            onAsk(turn.parent, edited.current!.value, turn.images);
          }}
        >
          <textarea ref={edited} rows={3} aria-label="Edited message">{turn.text}</textarea>
          <div class="row">
            <button type="submit">Send as a branch</button>
            <button type="button" class="quiet" onClick={() => setEditing(false)}>Cancel</button>
          </div>
        </form>
      ) : mine ? <p class="plain">{turn.text}</p> : <Markdown text={turn.text} />}
      {turn.busy && !turn.text && <p class="hint">…</p>}
      {turn.error && <p class="error" role="alert">{turn.error}</p>}
      {turn.stats && <StatsLine turn={turn} />}
      <div class="row tools">
        {siblings.length > 1 && (
          <>
            <button type="button" class="small quiet" disabled={place === 0} onClick={show(-1)} aria-label="Previous branch">‹</button>
            <span class="hint">branch {place + 1} of {siblings.length}</span>
            <button type="button" class="small quiet" disabled={place === siblings.length - 1} onClick={show(1)} aria-label="Next branch">›</button>
          </>
        )}
        {mine && !editing && idle && <button type="button" class="small quiet" onClick={() => setEditing(true)}>Edit</button>}
        {!mine && idle && (
          <button type="button" class="small quiet" onClick={() => onAgain(conversation.turns[turn.parent]!)}>Again</button>
        )}
      </div>
    </article>
  );
}

function StatsLine({ turn }: { turn: Turn }): VNode {
  const { promptTokens, cachedTokens, outputTokens, firstTokenS, tokensPerS, finish } = turn.stats!;
  const share = cachedTokens / promptTokens;
  return (
    <p class="stats">
      <span>{count(outputTokens)} tokens</span>
      {outputTokens > 1 && <span>{count(tokensPerS)} tokens/s</span>}
      <span>first after {duration(firstTokenS)}</span>
      <span title="Tokens of the prompt that were found in the radix tree">
        <meter min={0} max={1} value={share} aria-label="cached share of the prompt" /> {count(cachedTokens)} of {count(promptTokens)}{" "}
        prompt tokens cached ({percent(share)})
      </span>
      {finish && finish !== "stop" && <span>ended by {finish}</span>}
    </p>
  );
}

interface ComposerProps {
  images: boolean;
  busy: boolean;
  onSend: (text: string, images: string[]) => void;
  onNew: () => void;
}

function Composer({ images, busy, onSend, onNew }: ComposerProps): VNode {
  const field = useRef<HTMLTextAreaElement>(null);
  const [attached, setAttached] = useState<string[]>([]);
  const send = (): void => {
    const text = field.current!.value.trim();
    if (busy || (!text && !attached.length)) return;
    field.current!.value = "";
    setAttached([]);
    onSend(text, attached);
  };
  const attach = (event: Event): void => {
    const input = event.target as HTMLInputElement;
    for (const file of input.files ?? []) {
      const reader = new FileReader();
      reader.onload = () => setAttached((before) => [...before, reader.result as string]);
      reader.readAsDataURL(file);
    }
    input.value = "";
  };
  return (
    <form class="composer" onSubmit={(event) => { event.preventDefault(); send(); }}>
      {attached.length > 0 && (
        <div class="row">
          {attached.map((url, index) => (
            <button key={index} type="button" class="quiet" aria-label={`Remove image ${index + 1}`}
              onClick={() => setAttached(attached.filter((_, other) => other !== index))}>
              <img src={url} alt="" />
            </button>
          ))}
        </div>
      )}
      <textarea
        ref={field} rows={2} aria-label="Message" placeholder="Message (Enter sends, Shift+Enter breaks the line)"
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            send();
          }
        }}
      />
      <div class="row">
        {busy ? <button type="button" class="stop" onClick={() => running?.abort()}>Stop</button> : <button type="submit">Send</button>}
        {images && <label class="button quiet">Image<input class="visually-hidden" type="file" accept="image/*" multiple onChange={attach} /></label>}
        <button type="button" class="quiet" onClick={onNew}>New chat</button>
      </div>
    </form>
  );
}
