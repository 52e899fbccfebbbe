// One turn of a conversation, with what it cost, its branches, and the tools that it calls.
import type { RefObject, VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Conversation, ToolCall, Turn } from "./conversation";
import { count, duration, percent } from "./format";
import { Markdown } from "./markdown";
import { timelineOfAnswer } from "./worker";

interface MessageProps {
  turn: Turn;
  conversation: Conversation;
  idle: boolean;
  last: boolean;
  onAsk: (parent: number, text: string, images: string[]) => void;
  onAgain: (question: Turn) => void;
  onResults: (call: Turn, results: string[]) => void;
  onChoose: (turn: Turn) => void;
}

const SPEAKERS = { user: "You", assistant: "Assistant", tool: "Tool" };

export function Message({ turn, conversation, idle, last, onAsk, onAgain, onResults, onChoose }: MessageProps): VNode {
  const [editing, setEditing] = useState(false);
  const edited = useRef<HTMLTextAreaElement>(null);
  const editor = useRef<HTMLButtonElement>(null);
  useEffect(() => setEditing(false), [turn.id]); // a branch is shown in the place of another
  const edit = (): void => {
    setEditing(true);
    requestAnimationFrame(() => { // once it is drawn
      edited.current?.focus();
      edited.current?.setSelectionRange(turn.text.length, turn.text.length);
    });
  };
  const closeEditor = (): void => {
    setEditing(false);
    requestAnimationFrame(() => editor.current?.focus());
  };
  const siblings = conversation.siblings(turn);
  const place = siblings.indexOf(turn);
  const answer = turn.role === "assistant";
  return (
    <article class={`message ${turn.role}`} aria-label={SPEAKERS[turn.role]} aria-busy={turn.busy}>
      {turn.images.map((url, index) => <img key={index} src={url} alt={`attached image ${index + 1}`} />)}
      {turn.thinking && <details><summary>Thinking</summary><Markdown text={turn.thinking} /></details>}
      {turn.role === "tool" && <p class="hint">Result of {nameOfCall(conversation, turn)}</p>}
      {editing ? (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            closeEditor();
            onAsk(turn.parent, edited.current!.value, turn.images);
          }}
          onKeyDown={(event) => event.key === "Escape" && closeEditor()}
        >
          <textarea ref={edited} rows={3} aria-label="Edited message">{turn.text}</textarea>
          <div class="row">
            <button type="submit" disabled={!idle}>Send as a branch</button>
            <button type="button" class="quiet" onClick={closeEditor}>Cancel</button>
          </div>
        </form>
      ) : answer ? <Markdown text={turn.text} /> : <p class="plain">{turn.text}</p>}
      {turn.calls.map((call) => <Call key={call.id} call={call} />)}
      {turn.calls.length > 0 && last && idle && <Results calls={turn.calls} onSend={(results) => onResults(turn, results)} />}
      {turn.busy && !turn.text && !turn.calls.length && <p class="hint">…</p>}
      {turn.error && <p class="error" role="alert">{turn.error}</p>}
      {turn.stats && <StatsLine turn={turn} />}
      <div class="row tools">
        {siblings.length > 1 && (
          <>
            <Small off={place === 0} label="Previous branch" onClick={() => onChoose(siblings[place - 1]!)}>‹</Small>
            <span class="hint">branch {place + 1} of {siblings.length}</span>
            <Small off={place === siblings.length - 1} label="Next branch" onClick={() => onChoose(siblings[place + 1]!)}>›</Small>
          </>
        )}
        {turn.role === "user" && !editing && <Small off={!idle} button={editor} onClick={edit}>Edit</Small>}
        {answer && <Small off={!idle} onClick={() => onAgain(conversation.turns[turn.parent]!)}>Regenerate</Small>}
        {answer && !turn.busy && timelineOfAnswer(turn) && <a class="small" href={timelineOfAnswer(turn)}>Timeline</a>}
      </div>
    </article>
  );
}

interface SmallProps {
  off: boolean;
  label?: string;
  button?: RefObject<HTMLButtonElement>;
  onClick: () => void;
  children: string;
}

/** Keeps the focus while it does nothing, which a disabled button would lose to the top of the page. */
function Small({ off, label, button, onClick, children }: SmallProps): VNode {
  return (
    <button
      type="button" class="small quiet" ref={button} aria-label={label} aria-disabled={off}
      onClick={() => off || onClick()}
    >
      {children}
    </button>
  );
}

function nameOfCall(conversation: Conversation, turn: Turn): string {
  const calls = conversation.before(turn).flatMap(({ calls: made }) => made);
  return calls.findLast(({ id }) => id === turn.callId)?.name ?? "a tool";
}

function Call({ call }: { call: ToolCall }): VNode {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // not whole yet, or not JSON: as it came
  }
  return (
    <div class="code call">
      <div class="code-head">calls {call.name}</div>
      <pre tabIndex={0} aria-label={`Arguments of ${call.name}`}>{shown}</pre>
    </div>
  );
}

function Results({ calls, onSend }: { calls: ToolCall[]; onSend: (results: string[]) => void }): VNode {
  const form = useRef<HTMLFormElement>(null);
  return (
    <form
      class="results" ref={form}
      onSubmit={(event) => {
        event.preventDefault();
        onSend([...form.current!.querySelectorAll("textarea")].map((field) => field.value));
      }}
    >
      {calls.map((call) => <label key={call.id}>Result of {call.name}<textarea rows={2} spellcheck={false} /></label>)}
      <div class="row"><button type="submit">Send result{calls.length > 1 && "s"}</button></div>
    </form>
  );
}

function StatsLine({ turn }: { turn: Turn }): VNode {
  const { promptTokens, cachedTokens, outputTokens, firstTokenS, tokensPerS, finish } = turn.stats!;
  const share = cachedTokens / promptTokens;
  return (
    <p class="stats">
      <span>{count(outputTokens)} tokens</span>
      {outputTokens > 1 && <span>{count(tokensPerS)} tokens/s</span>}
      <span>TTFT {duration(firstTokenS)}</span>
      <span title="Tokens of the prompt that were found in the radix tree">
        <meter min={0} max={1} value={share} aria-label="cached share of the prompt" /> {count(cachedTokens)} of {count(promptTokens)}{" "}
        prompt tokens cached ({percent(share)})
      </span>
      {finish && finish !== "stop" && <span>finish reason: {finish}</span>}
    </p>
  );
}
