// Chat: answers as they come, branches, tools, and two models or settings side by side.
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { json, messageOf, ofGateway } from "./api";
import { Conversation, ROOT, type Turn } from "./conversation";
import { count } from "./format";
import { generate } from "./generate";
import { Message } from "./message";
import { type Sampling, SamplingForm, storedSampling } from "./sampling";
import { findWorker } from "./worker";

/** A conversation with the settings of its answers. Outlives a look at another view. */
class Side {
  conversation = new Conversation();
  running: AbortController | null = null;
  sampling: Sampling;

  constructor(readonly name: string, readonly stored: string) {
    this.sampling = storedSampling(stored);
  }

  reset(): void {
    this.running?.abort();
    this.conversation = new Conversation();
  }
}

const both = [new Side("A", ""), new Side("B", "-b")];
let compares = false;
let redraw = (): void => undefined; // of the view, while it is shown

export function Chat(): VNode {
  const [, setTick] = useState(0);
  const [models, setModels] = useState<string[]>([]);
  const [seeing, setSeeing] = useState<string[]>([]); // models that take images
  const [status, setStatus] = useState("");
  const sides = compares ? both : both.slice(0, 1);

  useEffect(() => {
    let frame = 0;
    redraw = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        setTick((tick) => tick + 1);
      });
    };
    const ask = (): void => {
      void modelNames().then((names) => {
        setModels(names);
        void whichSee(names).then(setSeeing);
      }, (error) => setStatus(messageOf(error)));
    };
    const link = (): void => both.forEach(({ conversation }) => conversation.turns.forEach(linkToTimeline));
    ask();
    link(); // a key may have been given in another view
    window.addEventListener("bough-keys", ask);
    window.addEventListener("bough-keys", link);
    return () => {
      window.removeEventListener("bough-keys", ask);
      window.removeEventListener("bough-keys", link);
      cancelAnimationFrame(frame);
      redraw = () => undefined;
    };
  }, []);

  const modelOf = ({ sampling }: Side): string => (models.includes(sampling.model) ? sampling.model : models[0] ?? "");
  const answer = async (side: Side, question: Turn): Promise<void> => {
    setStatus("Generating …");
    const control = new AbortController();
    const { conversation, sampling } = side;
    const turn = conversation.add(question.id, "assistant");
    side.running = control;
    turn.busy = true;
    redraw();
    await generate(conversation, turn, modelOf(side), sampling, control.signal, () => redraw());
    turn.busy = false;
    if (side.running === control) side.running = null;
    redraw();
    linkToTimeline(turn);
    setStatus(turn.error || `Answer complete: ${turn.stats ? count(turn.stats.outputTokens) : "no"} tokens.`);
  };
  return (
    <div class="chat">
      <section class="talk" aria-label="Conversation">
        <div class="sides">
          {sides.map((side) => <Talk key={side.name} side={side} alone={!compares} model={modelOf(side)} onAnswer={(turn) => void answer(side, turn)} />)}
        </div>
        <p role="status" class="visually-hidden">{status}</p>
        <Composer
          images={sides.every((side) => seeing.includes(modelOf(side)))}
          busy={sides.some(({ running }) => running !== null)}
          onSend={(text, images) => {
            for (const side of sides) void answer(side, side.conversation.add(side.conversation.shown.at(-1)?.id ?? ROOT, "user", text, images));
          }}
          onStop={() => both.forEach(({ running }) => running?.abort())}
          onCompare={() => {
            compares = !compares;
            both[1]!.running?.abort();
            both[1]!.conversation = both[0]!.conversation.copy();
            redraw();
          }}
          onNew={() => {
            both.forEach((side) => side.reset());
            redraw();
          }}
        />
      </section>
      <details class="panel" open={matchMedia("(min-width: 60rem)").matches}>
        <summary>Settings</summary>
        {sides.map((side) => (
          <>
            {compares && <h2>{side.name}</h2>}
            <SamplingForm
              key={side.name} side={side.stored} label={compares ? `Settings of ${side.name}` : "Settings of the chat"} models={models}
              onChange={(next) => {
                side.sampling = next;
                redraw(); // what is shown follows the model
              }}
            />
          </>
        ))}
      </details>
    </div>
  );
}

interface TalkProps {
  side: Side;
  alone: boolean;
  model: string;
  onAnswer: (question: Turn) => void;
}

function Talk({ side, alone, model, onAnswer }: TalkProps): VNode {
  const log = useRef<HTMLDivElement>(null);
  const { conversation } = side;
  const place = log.current; // as it is before this drawing
  const follow = place !== null && place.scrollHeight - place.scrollTop - place.clientHeight < 80;
  useEffect(() => {
    if (follow) log.current!.scrollTo(0, log.current!.scrollHeight);
  });
  const shown = conversation.shown;
  const results = (turn: Turn, given: string[]): void => {
    let last = turn;
    given.forEach((text, index) => {
      last = conversation.add(last.id, "tool", text, [], turn.calls[index]!.id);
    });
    onAnswer(last);
  };
  return (
    <div class="log" ref={log} role="log" aria-live="off" tabIndex={0} aria-label={alone ? "Messages" : `Messages of ${side.name}`}>
      {!alone && <h2>{side.name}{side.sampling.model && <small> {side.sampling.model}</small>}</h2>}
      {shown.length === 0 && (
        <p class="hint">
          {model ? <>Chat with <b>{model}</b>.</> : "No model yet."} What branches share is computed once: edit a question or
          ask for another answer, and see how many tokens were cached.
        </p>
      )}
      {shown.map((turn, index) => (
        <Message
          key={turn.parent} turn={turn} conversation={conversation} idle={side.running === null} last={index === shown.length - 1}
          onAsk={(parent, text, images) => onAnswer(conversation.add(parent, "user", text, images))} onAgain={onAnswer} onResults={results}
          onChoose={(other) => {
            conversation.choose(other);
            redraw();
          }}
        />
      ))}
    </div>
  );
}

/** On a gateway's page the worker that has the timeline must be found first. */
function linkToTimeline(turn: Turn): void {
  if (ofGateway && turn.rid && turn.worker === null && !turn.busy) void findWorker(turn).then(() => redraw());
}

async function modelNames(): Promise<string[]> {
  const models = await json<{ data: { id: string }[] }>("/v1/models");
  return models.data.map(({ id }) => id);
}

/** Behind a gateway there may be engines of other kinds, which do not tell. */
async function whichSee(names: string[]): Promise<string[]> {
  const told = await Promise.all(names.map((model) => json<{ capabilities?: string[] }>("/api/show", { body: { model } }).catch(() => null)));
  return names.filter((_, index) => told[index]?.capabilities?.includes("vision"));
}

interface ComposerProps {
  images: boolean;
  busy: boolean;
  onSend: (text: string, images: string[]) => void;
  onStop: () => void;
  onCompare: () => void;
  onNew: () => void;
}

function Composer({ images, busy, onSend, onStop, onCompare, onNew }: ComposerProps): VNode {
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
        {busy ? <button type="button" class="stop" onClick={onStop}>Stop</button> : <button type="submit">Send</button>}
        {images && <label class="button quiet">Image<input class="visually-hidden" type="file" accept="image/*" multiple onChange={attach} /></label>}
        <button type="button" class="quiet" onClick={onNew}>New chat</button>
        <button type="button" class="quiet" aria-pressed={compares} onClick={onCompare}>{compares ? "Close comparison" : "Compare two"}</button>
      </div>
    </form>
  );
}
