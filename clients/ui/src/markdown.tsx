// Markdown to elements. Text of a model is never read as HTML: tags in it are shown as they are.
import { lexer, type Token, type Tokens } from "marked";
import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";

export function Markdown({ text }: { text: string }): VNode {
  return <div class="markdown">{blocks(lexer(text))}</div>;
}

function blocks(tokens: Token[] | undefined): ComponentChildren {
  return tokens?.map((token, index) => <Piece key={index} token={token} />);
}

function Piece({ token }: { token: Token }): VNode | null {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      const Heading = `h${Math.min(6, (token as Tokens.Heading).depth + 2)}` as "h3";
      return <Heading>{blocks(token.tokens)}</Heading>;
    }
    case "paragraph":
      return <p>{blocks(token.tokens)}</p>;
    case "code":
      return <Code text={token.text} language={token.lang ?? ""} />;
    case "blockquote":
      return <blockquote>{blocks(token.tokens)}</blockquote>;
    case "hr":
      return <hr />;
    case "list": {
      const list = token as Tokens.List;
      const items = list.items.map((item, index) => (
        <li key={index}>
          {item.task && <input type="checkbox" disabled checked={!!item.checked} aria-label="task" />}
          {blocks(item.tokens)}
        </li>
      ));
      return list.ordered ? <ol start={list.start || 1}>{items}</ol> : <ul>{items}</ul>;
    }
    case "table": {
      const table = token as Tokens.Table;
      return (
        <div class="scroll" tabIndex={0} role="region" aria-label="table">
          <table>
            <thead><tr>{table.header.map((cell, i) => <th key={i}>{blocks(cell.tokens)}</th>)}</tr></thead>
            <tbody>
              {table.rows.map((row, r) => <tr key={r}>{row.map((cell, i) => <td key={i}>{blocks(cell.tokens)}</td>)}</tr>)}
            </tbody>
          </table>
        </div>
      );
    }
    case "strong":
      return <strong>{blocks(token.tokens)}</strong>;
    case "em":
      return <em>{blocks(token.tokens)}</em>;
    case "del":
      return <del>{blocks(token.tokens)}</del>;
    case "codespan":
      return <code>{token.text}</code>;
    case "br":
      return <br />;
    case "link": {
      const link = token as Tokens.Link;
      // Other schemes (javascript:, data:) are text.
      if (!/^(https?:|mailto:)/i.test(link.href)) return <>{blocks(link.tokens)}</>;
      return <a href={link.href} target="_blank" rel="noopener noreferrer">{blocks(link.tokens)}</a>;
    }
    case "image":
      return <>{`[${(token as Tokens.Image).text}]`}</>; // it would be fetched from another host
    case "text":
      return "tokens" in token && token.tokens ? <>{blocks(token.tokens)}</> : <>{unescaped(token.text)}</>;
    case "escape":
      return <>{unescaped(token.text)}</>;
    default:
      return <>{token.raw}</>;
  }
}

const ENTITIES: Record<string, string> = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'" };
const unescaped = (text: string): string => text.replace(/&(?:amp|lt|gt|quot|#39);/g, (found) => ENTITIES[found]!);

export function Code({ text, language }: { text: string; language: string }): VNode {
  const [copied, setCopied] = useState(false);
  const copy = async (): Promise<void> => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <div class="code">
      <div class="code-head">
        <span>{language}</span>
        {navigator.clipboard && <button type="button" class="small" onClick={copy}>{copied ? "Copied" : "Copy"}</button>}
      </div>
      <pre tabIndex={0}><code>{text}</code></pre>
    </div>
  );
}
