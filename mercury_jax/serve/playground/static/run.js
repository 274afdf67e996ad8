// One run on the stage: its heading, figures and canvas.

import { Canvas, element } from "./canvas.js";
import { Trace, figures } from "./trace.js";

const number = (x, digits) => x === null
  ? "–"
  : x.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

export class Run {
  constructor(name, title, { pick, select }) {
    this.name = name;
    this.trace = new Trace();
    this.node = element("article", `panel run-card ${name}`);
    this.node.setAttribute("aria-label", title);
    this.title = element("h2", "", title);
    this.state = element("span", "badge");
    const head = element("header");
    head.append(this.title, this.state);
    this.numbers = new Map();
    const dl = element("dl", "figures");
    for (const [key, text] of [["perSecond", "tokens per second"], ["perStep", "tokens per step"], ["forwards", "forward passes"]]) {
      const cell = element("div"), dt = element("dt", "", text), dd = element("dd", "", "–");
      cell.append(dt, dd);
      dl.append(cell);
      this.numbers.set(key, dd);
    }
    this.meter = element("progress", "meter");
    this.meter.max = 1;
    this.meter.value = 0;
    this.meter.setAttribute("aria-label", "accepted tokens");
    const body = element("div", "canvas");
    this.node.append(head, dl, this.meter, body);
    this.canvas = new Canvas(body, `${title}: tokens`, {
      pick: (i) => pick(this, i), select: (range) => select(this, range),
    });
  }

  /** Take over a trace: a new one, or one of a file. */
  take(trace, title) {
    this.trace = trace;
    this.title.textContent = title;
    this.node.setAttribute("aria-label", title);
    this.canvas.mark(null);
    this.canvas.choose(-1);
    this.failed = "";
  }

  /** Show step k. */
  show(k) {
    const state = this.trace.state(k), sums = figures(state), ended = this.trace.end !== null && k >= this.trace.length;
    this.canvas.given(askedOf(this.trace), givenBefore(this.trace), this.trace.start?.after ?? "");
    this.canvas.render(state);
    this.numbers.get("perSecond").textContent = number(sums.perSecond, 0);
    this.numbers.get("perStep").textContent = number(sums.perStep, sums.perStep >= 10 ? 1 : 2);
    this.numbers.get("forwards").textContent = number(sums.forwards, 0);
    this.meter.value = state.cells.length ? sums.settled / state.cells.length : 0;
    this.node.classList.toggle("ended", ended);
    this.badge(ended, state);
  }

  /** Show the time of a race in place of the badge; `arrived`: the run has ended by then. */
  clock(text, arrived) {
    this.state.textContent = text;
    this.state.classList.toggle("good", arrived);
  }

  badge(ended, state) {
    const waits = this.trace.length === 0 && !this.trace.end;
    const ends = { stop: "done", length: "done: length", cancelled: "stopped", error: "failed" };
    const going = waits ? (this.trace.start ? "noise" : "") : `${state.settled} of ${state.cells.length} accepted`;
    this.state.textContent = this.failed || (ended ? ends[this.trace.end.finish] ?? "done" : going);
    this.state.classList.toggle("good", ended && ["stop", "length"].includes(this.trace.end.finish));
  }
}

/** The last message of a conversation. */
function askedOf(trace) {
  const messages = trace.request?.messages;
  return Array.isArray(messages) ? String(messages.at(-1)?.content ?? "") : "";
}

/** What the answer stands behind: the text before a hole, or the text that it goes on with. */
function givenBefore(trace) {
  if (trace.start?.before) return trace.start.before;
  return trace.request?.kind === "text" ? String(trace.request.prompt ?? "") : "";
}
