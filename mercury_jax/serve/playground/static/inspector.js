// What is known of one cell: the five likeliest tokens there, and how it came to be.

import * as api from "./api.js";
import { element, kind, label, percent, visible } from "./canvas.js";
import { LEFT_TO_RIGHT } from "./controls.js";

const OTHER = "This trace is of another model: only what it recorded can be shown.";
const EXACT = "By the model alone, without temperature.";
const NEARLY = "By the model alone, from nearly what the pass read: a trace does not keep all of it.";
const COMPILING = "asking … the first question about a token compiles a program, which takes some seconds.";
const SLOW = 1500;  // ms after which it is said why nothing is there yet
const CALM = 120;  // ms: who drags the slider asks once, at the end

export class Inspector {
  constructor(host) {
    this.host = host;
    this.asked = null;
    this.clear();
  }

  clear() {
    this.asked?.abort();
    const hint = matchMedia("(pointer: coarse)").matches
      ? "Tap a token to see the five most probable tokens at its position. In a finished answer, tap it again to rewrite it."
      : "Select a token with a click or ⏎ to see the five most probable tokens at its position.";
    this.host.replaceChildren(element("h2", "", "Token"), element("p", "hint", hint));
  }

  /** Show cell i of a run at step k. models: has(name) of those that serve now; only their passes can be repeated. */
  async show(run, i, k, models) {
    this.asked?.abort();
    const trace = run.trace, cell = trace.state(k).cells[i];
    if (!cell || k === 0) return this.clear();
    const step = trace.looked(i, k), head = element("h2", "", `Token ${i + 1}`);
    const name = element("p", "token-name");
    const shown = kind(cell) === "noise" ? "noise" : visible(cell);
    name.append(element("code", "", shown), element("span", "", facts(cell, i)));
    const bars = element("ol", "bars");
    bars.setAttribute("aria-label", `The five most probable tokens before pass ${step}`);
    const note = element("p", "hint", "asking …");
    const title = element("h3", "", `Most probable in pass ${step}`);
    this.host.replaceChildren(head, name, title, bars, note, ...past(trace, i, k));
    const why = unasked(trace, i, step, models);
    if (why) {
      note.textContent = why;
      return null;
    }
    const asked = this.asked = new AbortController();
    const slow = setTimeout(() => { note.textContent = COMPILING; }, SLOW);
    try {
      await new Promise((go) => setTimeout(go, CALM));
      if (asked.signal.aborted) return null;
      const { top, exact } = await api.top(question(trace, i, step), asked.signal);
      bars.replaceChildren(...top.map((one) => bar(one, cell)));
      note.textContent = exact ? EXACT : NEARLY;
    } catch (error) {
      if (error.name !== "AbortError") note.textContent = error.message;
    } finally {
      clearTimeout(slow);
    }
    return null;
  }
}

function facts(cell, i) {
  return label(cell, i).split(", ").slice(1).join(", ") || "noise";
}

/** Why the most probable tokens of a cell are not available; "" where they are. */
function unasked(trace, i, step, models) {
  if (!trace.request || !models.has(trace.start.model)) return OTHER;
  if (trace.request.rule === LEFT_TO_RIGHT) return "Left to right, a pass looks at the next token alone.";
  return trace.frames[step - 1].start > i ? "No pass looked at this token: the grammar wrote it." : "";
}

/** The canvas before the pass that made `step`, as the server wants it. */
function question(trace, index, step) {
  const before = step > 1 ? trace.state(step - 1).cells : [];
  return {
    request: { ...trace.request, model: trace.start.model }, index, start: trace.frames[step - 1].start,
    tokens: before.map((c) => Math.max(0, c.id)), settled: before.map((c) => Number(c.settled)),
  };
}

function bar({ text, kind: flags, id, p }, cell) {
  const item = element("li", id === cell.id ? "own" : ""), fill = element("span", "fill");
  fill.style.setProperty("--p", String(p));
  const shown = visible({ text, special: Boolean(flags & 4), bytes: Boolean(flags & 8) });
  const value = element("span", "value", p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);
  item.append(element("code", flags & 4 ? "special" : "", shown), fill, value);
  item.title = `id ${id}`;
  return item;
}

/** The steps at which the cell changed, and its confidence over all of them. */
function past(trace, i, k) {
  const list = element("ol", "past"), curve = element("div", "curve");
  for (const { step, text, p, settled, special } of trace.history(i, k).slice(-8)) {
    const item = element("li");
    const what = kind({ id: 0, p, settled, special, text }) === "noise" ? "noise" : visible({ text, special });
    const value = element("span", "value", `${settled ? "accepted" : "guess"}, ${percent(p)}`);
    item.append(element("span", "step", `step ${step}`), element("code", "", what), value);
    list.append(item);
  }
  const seen = trace.confidences(i, k);
  for (const p of seen.slice(-64)) {
    const one = element("i");
    one.style.setProperty("--p", String(p ?? 0));
    curve.append(one);
  }
  curve.setAttribute("role", "img");
  curve.setAttribute("aria-label", `Confidence over ${seen.length} steps, now ${percent(seen.at(-1) ?? 0)}`);
  return [element("h3", "", "History"), curve, list];
}
