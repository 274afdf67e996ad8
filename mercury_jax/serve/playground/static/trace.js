// A run as it was: frames of changed cells, from which the canvas of any step is rebuilt. No document in here.

import { ratio } from "./race.js";

export const SETTLED = 1, FORCED = 2, SPECIAL = 4, BYTES = 8;  // bits of a cell's flags, as the server sends them
const APART = 16;  // steps between two states that are kept whole
const MOST_FRAMES = 20_000, MOST_CELLS = 8192, MOST_TEXT = 4096;

const EMPTY = Object.freeze({ step: 0, cells: [], start: 0, forwards: 0, ms: 0, settled: 0 });

/** The events of one run, in order. `state(k)` is the canvas after step k; state(0) is the noise before the first. */
export class Trace {
  constructor(request = null) {
    this.request = request;
    this.start = null;
    this.frames = [];
    this.end = null;
    this.kept = new Map([[0, EMPTY]]);
  }

  /** Take an event of the stream. */
  push(event) {
    if (event.type === "start") this.start = event;
    else if (event.type === "frame") this.frames.push(event);
    else if (event.type === "end") this.end = event;
  }

  get length() { return this.frames.length; }

  /** {step, cells, start, forwards, ms, settled} after step k, exactly as the run had it. */
  state(k) {
    const step = Math.max(0, Math.min(k, this.length));
    if (step === 0) return this.noise();
    let at = step - (step % APART);
    while (!this.kept.has(at)) at -= APART;
    let state = this.kept.get(at);
    while (at < step) {
      state = apply(state, this.frames[at], ++at);
      if (at % APART === 0) this.kept.set(at, state);
    }
    return state;
  }

  /** The canvas before the first pass: as many noise cells as that pass showed. */
  noise() {
    const room = this.start ? Math.min(this.start.block, this.start.max_tokens + this.start.thinking) : 0;
    const n = this.frames[0]?.n ?? (this.end ? 0 : room);
    return { ...EMPTY, cells: Array.from({ length: n }, () => NOISE) };
  }

  /** The last step up to k whose pass looked at cell i. */
  looked(i, k) {
    let step = Math.min(k, this.length);
    while (step > 1 && this.frames[step - 1].start > i) step--;
    return step;
  }

  /** The steps up to k at which cell i changed its token: [{step, text, p, settled}], oldest first. */
  history(i, k) {
    const found = [];
    for (let step = 1; step <= Math.min(k, this.length); step++) {
      const cell = this.frames[step - 1].cells.find((c) => c[0] === i);
      if (!cell) continue;
      const [, id, text, flags, p] = cell, settled = Boolean(flags & SETTLED), last = found.at(-1);
      if (last && last.id === id && last.settled === settled) continue;
      found.push({ step, id, text, p, settled, special: Boolean(flags & SPECIAL) });
    }
    return found;
  }

  /** Confidence of cell i at each step 1..k; null where it did not exist. */
  confidences(i, k) {
    const last = Math.min(k, this.length), out = [];
    let p = null;
    for (const frame of this.frames.slice(0, last)) {
      p = frame.cells.find((c) => c[0] === i)?.[4] ?? (i < frame.n ? p : null);
      out.push(p);
    }
    return out;
  }
}

const NOISE = Object.freeze({
  id: -1, text: "", settled: false, forced: false, special: false, bytes: false, p: 0, settledAt: 0, revised: 0,
});

function apply(state, frame, step) {
  const cells = state.cells.slice(0, frame.n);
  for (const [i, id, text, flags, p] of frame.cells) {
    const old = state.cells[i], settled = Boolean(flags & SETTLED);
    const undone = old?.settled && (old.id !== id || !settled);
    const anew = settled && (!old?.settled || old.id !== id);
    cells[i] = {
      id, text, settled, p, forced: Boolean(flags & FORCED), special: Boolean(flags & SPECIAL),
      bytes: Boolean(flags & BYTES), settledAt: anew ? step : settled ? old.settledAt : 0,
      revised: (old?.revised ?? 0) + (undone ? 1 : 0),
    };
  }
  const settled = cells.reduce((sum, cell) => sum + cell.settled, 0);
  return { step, cells, start: frame.start, forwards: frame.forwards, ms: frame.ms, settled };
}

/** What a run has cost up to a state. Rates are null where nothing has been measured. */
export function figures({ settled, forwards, ms }) {
  return {
    forwards, settled,
    perStep: forwards ? settled / forwards : null,
    perSecond: ms ? (1000 * settled) / ms : null,
  };
}

/** "n things", singular for 1. */
export function counted(n, thing, more = `${thing}s`) {
  return `${n} ${n === 1 ? thing : more}`;
}

/** "2 forward passes instead of 32: 16 times fewer." */
export function fewer(a, b) {
  const own = counted(a, "forward pass", "forward passes");
  if (a === b) return `${own} on both sides.`;
  return `${own} instead of ${b}${ratio(b / a, "fewer", "as many")}.`;
}

/** The text of cells, characters that several cells share put together. */
export function textOf(cells) {
  const encoder = new TextEncoder(), parts = [];
  for (const cell of cells) {
    if (cell.special) continue;
    parts.push(...(cell.bytes ? cell.text.split(" ").map((h) => parseInt(h, 16)) : encoder.encode(cell.text)));
  }
  return new TextDecoder().decode(new Uint8Array(parts));
}

const FORMAT = "mercury-jax-trace";

/** Runs as the text of a file. */
export function exported(runs, saved) {
  const bare = runs.map(({ request, start, frames, end }) => ({ request, start, frames, end }));
  return JSON.stringify({ format: FORMAT, version: 1, saved, runs: bare }, null, 1);
}

/** The runs of such a text. Throws an Error in words for what is no trace. */
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (data?.format !== FORMAT || data.version !== 1) throw new Error(`This file is not a ${FORMAT} of version 1.`);
  if (!Array.isArray(data.runs) || data.runs.length < 1 || data.runs.length > 2) {
    throw new Error("A trace has one or two runs.");
  }
  return data.runs.map(restored);
}

function restored(run) {
  if (!isObject(run?.start) || !Array.isArray(run.frames) || run.frames.length > MOST_FRAMES) {
    throw new Error("A run of this trace is invalid.");
  }
  const trace = new Trace(isObject(run.request) ? run.request : null);
  const { block, max_tokens, thinking } = run.start;
  if (![block, max_tokens, thinking].every((x) => isCount(x))) throw new Error("The start of a run is invalid.");
  const around = { before: String(run.start.before ?? ""), after: String(run.start.after ?? "") };
  trace.push({ ...run.start, ...around, type: "start" });
  let seen = 0;
  run.frames.forEach((frame, i) => {
    if (!sound(frame, seen)) throw new Error(`Step ${i + 1} of this trace is invalid.`);
    seen = frame.n;
    trace.push({ ...frame, type: "frame" });
  });
  if (isObject(run.end)) trace.push({ ...run.end, type: "end", text: String(run.end.text ?? "") });
  return trace;
}

const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const isCount = (x, most = MOST_CELLS) => Number.isInteger(x) && x >= 0 && x <= most;

/** Whether a frame has cells of the right kind, and tells of every cell that is new. */
function sound(frame, seen) {
  if (!isObject(frame) || !isCount(frame.n) || !isCount(frame.start) || !isCount(frame.forwards, 1e6)) return false;
  if (!Number.isFinite(frame.ms) || !Array.isArray(frame.cells)) return false;
  const told = new Set();
  for (const cell of frame.cells) {
    if (!Array.isArray(cell) || cell.length !== 5) return false;
    const [i, id, text, flags, p] = cell;
    if (!isCount(i, frame.n - 1) || !isCount(id, 1e7) || !isCount(flags, 15)) return false;
    if (typeof text !== "string" || text.length > MOST_TEXT || !(p >= 0 && p <= 1)) return false;
    told.add(i);
  }
  for (let i = seen; i < frame.n; i++) if (!told.has(i)) return false;
  return true;
}
