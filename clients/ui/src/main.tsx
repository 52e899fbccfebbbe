// The frame: navigation by the address's fragment, and the dialog that asks for keys.
import { render, type VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type Access, keys, ofGateway } from "./api";
import { Chat } from "./chat";
import { Gateway } from "./gateway";
import { Overview } from "./overview";
import "./style.css";
import { Timelines } from "./timelines";
import { Tree } from "./tree";
import { OfWorker } from "./worker";

interface View {
  title: string;
  show: (about: string, worker: string) => VNode; // what follows the view's name in the address
}

const VIEWS: Record<string, View> = {
  chat: { title: "Chat", show: () => <Chat /> },
  overview: { title: "Overview", show: () => <Overview /> },
  ...(ofGateway && { gateway: { title: "Gateway", show: () => <Gateway /> } }),
  timelines: { title: "Timelines", show: (rid, worker) => <OfWorker wanted={worker} show={(source) => <Timelines rid={rid} source={source} />} /> },
  tree: { title: "Tree", show: () => <OfWorker wanted="" show={(source) => <Tree source={source} />} /> },
};

function place(): [string, string, string] {
  const [view = "", about = "", worker = ""] = location.hash.slice(1).split("/");
  try {
    if (Object.hasOwn(VIEWS, view)) return [view, decodeURIComponent(about), decodeURIComponent(worker)];
  } catch {
    // a link that was cut, such as #timelines/%
  }
  return ["chat", "", ""];
}

interface Asked {
  first: Access;
  refused: boolean; // the key that was given, by the server
}

function App(): VNode {
  const [[view, about, worker], setView] = useState(place);
  const [asked, setAsked] = useState<Asked | null>(null);
  const main = useRef<HTMLElement>(null);
  useEffect(() => {
    const go = (): void => {
      setView(place());
      main.current?.focus();
    };
    const want = (event: Event): void => {
      const first = (event as CustomEvent<Access>).detail;
      setAsked({ first, refused: keys.get(first) !== "" });
    };
    window.addEventListener("hashchange", go);
    window.addEventListener("bough-key-wanted", want);
    return () => {
      window.removeEventListener("hashchange", go);
      window.removeEventListener("bough-key-wanted", want);
    };
  }, []);
  const { title, show } = VIEWS[view]!;
  useEffect(() => {
    document.title = `${title} – Bough`;
  }, [title]);
  return (
    <>
      <header>
        <h1>Bough</h1>
        <nav aria-label="Views">
          {Object.entries(VIEWS).map(([name, { title: label }]) => (
            <a key={name} href={`#${name}`} aria-current={name === view ? "page" : undefined}>{label}</a>
          ))}
        </nav>
        <button type="button" class="quiet" onClick={() => setAsked({ first: "api", refused: false })}>Keys</button>
      </header>
      <main ref={main} tabIndex={-1} aria-label={title}>{show(about, worker)}</main>
      {asked && <KeyDialog {...asked} onClose={() => setAsked(null)} />}
    </>
  );
}

function KeyDialog({ first, refused, onClose }: Asked & { onClose: () => void }): VNode {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const close = (): void => dialog.current?.close(); // gives the focus back
  const save = (event: SubmitEvent): void => {
    event.preventDefault();
    const data = new FormData(event.target as HTMLFormElement);
    close();
    keys.set({ api: String(data.get("api")).trim(), admin: String(data.get("admin")).trim() });
  };
  const field = (access: Access, label: string): VNode => (
    <label>
      {label}
      <input name={access} type="password" autocomplete="off" defaultValue={keys.get(access)} autofocus={access === first} />
    </label>
  );
  return (
    <dialog ref={dialog} onClose={onClose} aria-labelledby="keys">
      <form onSubmit={save}>
        <h2 id="keys">Keys</h2>
        {refused && <p class="error" role="alert">The server did not accept the key.</p>}
        <p>{first === "admin" ? "This needs the management key." : "Data of this server may need a key."} It stays in this tab.</p>
        {field("api", "API key")}
        {field("admin", "Management key")}
        <div class="row">
          <button type="submit">Use</button>
          <button type="button" class="quiet" onClick={close}>Cancel</button>
        </div>
      </form>
    </dialog>
  );
}

render(<App />, document.getElementById("app")!);
