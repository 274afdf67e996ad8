// The conversation as plain text: turns with folded thinking, code set as code, calls of tools with fields for their
// results, a button that copies. All text goes in as text, never as markup.

import { element } from "./canvas.js";

const FENCE = /^```([\w+-]*)[^\n]*\n([\s\S]*?)(?:^```[^\n]*$|$(?![\s\S]))/gm;
const TOKEN = new RegExp([
  /(?<comment>#[^\n]*|\/\/[^\n]*|\/\*[\s\S]*?\*\/)/, /(?<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`[^`]*`)/,
  /(?<number>\b\d[\w.]*\b)/,
  /(?<word>\b(?:and|as|assert|async|await|break|case|catch|class|const|continue|def|del|elif|else|except|export|false|False|finally|for|from|function|if|import|in|interface|is|lambda|let|match|new|None|not|null|or|pass|raise|return|self|static|struct|switch|this|throw|true|True|try|type|var|while|with|yield)\b)/,
].map((part) => part.source).join("|"), "g");

/** A text as nodes: paragraphs, and blocks between ``` fences as code with coloured words. */
export function rendered(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(FENCE)) {
    if (found.index > at) parts.push(prose(text.slice(at, found.index).trim()));
    parts.push(codeBlock(found[2]));
    at = found.index + found[0].length;
  }
  if (at < text.length) parts.push(prose(at ? text.slice(at).trim() : text));
  return parts;
}

/** Plain text, from left to right or from right to left as its first letter is written. */
function prose(text, name = "prose") {
  const node = element("div", name, text);
  node.dir = "auto";
  return node;
}

/** Source code with its comments, strings, numbers and keywords marked. */
export function codeBlock(source) {
  const block = element("pre", "code"), code = element("code");
  let at = 0;
  for (const found of source.matchAll(TOKEN)) {
    const [kind] = Object.entries(found.groups).find(([, value]) => value !== undefined);
    code.append(source.slice(at, found.index), element("span", `is-${kind}`, found[0]));
    at = found.index + found[0].length;
  }
  code.append(source.slice(at));
  block.append(code);
  return block;
}

/** A button that copies what `text()` returns. */
export function copyButton(text, name = "Copy") {
  const button = element("button", "copy", name);
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";  // the browser refuses, most often over plain http
    }
    setTimeout(() => { button.textContent = name; }, 1500);
  });
  return button;
}

export class Conversation {
  /** host: where the turns are shown. changed(): a new conversation was begun. send(request): results of tools. */
  constructor(host, changed, send) {
    this.host = host;
    this.changed = changed;
    this.send = send;
    this.turns = [];
  }

  /** The messages of a request: the system prompt, earlier turns where they are kept, and the question. */
  messages(question, system, keep) {
    const said = keep ? this.turns.filter((turn) => turn.chat).flatMap(messagesOf) : [];
    return [...(system ? [{ role: "system", content: system }] : []), ...said, { role: "user", content: question }];
  }

  /** The request that goes on from the calls of the last turn, with a result for each. */
  answered(results) {
    const { request, calls, answer } = this.turns.at(-1);
    const given = results.map((content, i) => ({ role: "tool", tool_call_id: calls[i].id, content }));
    return { ...request, tool_choice: "auto", messages: [...request.messages, assistant(answer, calls), ...given] };
  }

  /** Take over a finished answer; without `keep` it is the only one. several: it says which model wrote it. */
  add(trace, keep, several) {
    const { request, end, start } = trace, chat = request?.kind === "chat";
    const messages = chat ? request.messages : [];
    const said = messages.slice(messages.findLastIndex(({ role }) => role === "assistant") + 1)
      .filter(({ role }) => role !== "system");
    const asked = chat ? said.map(({ content }) => content).join("\n") : request?.prompt ?? start?.before ?? "";
    const written = { answer: end.text, calls: end.calls ?? [], thinking: end.thinking ?? "" };
    const model = several ? start.model : "";
    const turn = { chat, request, said, asked, ...written, after: start?.after ?? "", model };
    const goesOn = keep || said.some(({ role }) => role === "tool");
    this.turns = goesOn && chat ? [...this.turns.filter((one) => one.chat), turn] : [turn];
    this.show();
  }

  clear() {
    this.turns = [];
    this.show();
    this.changed();
  }

  show() {
    this.host.hidden = this.turns.length === 0;
    const head = element("header"), fresh = element("button", "", "New conversation");
    fresh.type = "button";
    fresh.addEventListener("click", () => this.clear());
    head.append(element("h2", "", this.turns.length > 1 ? "Conversation" : "Answer"), fresh);
    this.host.replaceChildren(head, ...this.turns.map((turn) => shown(turn, this.turns.length > 1)));
    const last = this.turns.at(-1);
    if (last?.calls.length) this.host.append(this.results(last.calls));
  }

  /** A field for the result of each call, and the button that sends them. */
  results(calls) {
    const form = element("form", "results"), send = element("button", "primary", "Send results");
    const fields = calls.map(({ function: { name } }) => {
      const label = element("label", "field", `Result of ${name}`), field = element("textarea");
      field.rows = 2;
      field.required = true;
      label.append(field);
      return [label, field];
    });
    form.append(...fields.map(([label]) => label), send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.answered(fields.map(([, field]) => field.value)));
    });
    return form;
  }
}

function assistant(answer, calls) {
  return { role: "assistant", content: calls.length ? answer || null : answer, ...(calls.length && { tool_calls: calls }) };
}

/** The messages of a finished turn. */
function messagesOf({ said, answer, calls }) {
  return [...said, assistant(answer, calls)];
}

function shown(turn, several) {
  const node = element("article", "turn"), answer = element("div", "answer");
  const whole = turn.chat ? turn.answer : turn.asked + turn.answer + turn.after;
  if (several) node.append(prose(turn.asked, "asked"));
  if (turn.model) node.append(element("div", "by", turn.model));
  if (turn.thinking) {
    const folded = element("details", "thinking");
    folded.append(element("summary", "", "Thinking"), prose(turn.thinking));
    node.append(folded);
  }
  answer.append(...(turn.chat ? rendered(whole) : [codeBlock(whole)]), ...turn.calls.map(called));
  const text = [whole, ...turn.calls.map((call) => JSON.stringify(call.function))].filter(Boolean).join("\n");
  node.append(answer, copyButton(() => text));
  return node;
}

/** A call of a tool: its name, and the arguments a line each. */
function called({ function: { name, arguments: text } }) {
  const node = element("div", "call");
  let given = text;
  try {
    given = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* of a model whose calls are not JSON: as it is */ }
  node.append(element("b", "", `Calls ${name}`), codeBlock(given));
  return node;
}
