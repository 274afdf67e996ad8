// One canvas: a cell a token, kept in step with a state of a trace. Texts go in as text, never as markup.

const UNSURE = 0.25;  // a best guess less probable than this is shown as noise
const BANDS = [0.25, 0.5, 0.75, 0.9, 0.99];  // confidence from which each band begins

export const MASK = "▒";

/** 0 (noise) to 5: the band of a cell's confidence. */
export function band(p) {
  return BANDS.filter((from) => p >= from).length;
}

/** "noise", "guess" or "settled". */
export function kind(cell) {
  if (cell.settled) return "settled";
  return cell.id < 0 || cell.p < UNSURE || cell.special && cell.text === "mask" ? "noise" : "guess";
}

/** A token as it can be seen: line ends, tabs and lone spaces get a mark. */
export function visible(cell) {
  if (cell.special || cell.bytes) return cell.text;
  const marked = cell.text.replaceAll("\r", "␍").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return marked.trim() === "" ? marked.replaceAll(" ", "·") : marked;
}

/** A token as it is read out. */
export function spoken(cell) {
  if (cell.special) return `${cell.text.replaceAll("_", " ")}, control token`;
  if (cell.bytes) return `bytes ${cell.text}`;
  const named = { "\n": "line end", " ": "space", "\t": "tab", "": "nothing" };
  return named[cell.text] ?? (cell.text.trim() === "" ? `${cell.text.length} spaces or line ends` : cell.text);
}

export function percent(p) {
  return p > 0.995 && p < 1 ? `${(100 * p).toFixed(1)} %` : `${Math.round(100 * p)} %`;
}

/** What a screen reader says of a cell. */
export function label(cell, i) {
  const what = kind(cell);
  if (what === "noise") return `Token ${i + 1}: noise`;
  const more = [what === "settled" ? "accepted" : "a guess", percent(cell.p)];
  if (cell.revised) more.push("revised");
  if (cell.forced) more.push("forced by the grammar");
  return `Token ${i + 1}: ${spoken(cell)}, ${more.join(", ")}`;
}

export class Canvas {
  /** pick(i): a cell was chosen. select(from, to): cells from..to are marked, null for none. */
  constructor(host, name, { pick, select }) {
    this.pick = pick;
    this.select = select;
    this.asked = element("span", "asked");
    this.before = element("span", "given");
    this.after = element("span", "given");
    this.list = element("span", "tokens");
    this.list.setAttribute("role", "listbox");
    this.list.setAttribute("aria-label", name);
    this.list.setAttribute("aria-multiselectable", "true");
    this.list.tabIndex = 0;
    this.list.dir = this.asked.dir = "auto";
    this.host = host;
    host.replaceChildren(this.asked, this.before, this.list, this.after);
    this.cells = [];
    this.shown = [];
    this.marked = null;
    this.chosen = -1;
    this.anchor = 0;
    this.at = 0;
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("pointerdown", (event) => this.down(event));
    this.list.addEventListener("click", (event) => this.tapped(event));
    this.list.addEventListener("pointerover", (event) => this.over(event));
    this.list.addEventListener("focus", () => this.cells.length && this.focus(this.at));
  }

  /** Show what was asked, the text in front of the cells, and the text behind them. */
  given(asked, before, after) {
    this.asked.textContent = asked;
    this.asked.hidden = !asked;
    this.before.textContent = before;
    this.after.textContent = after;
  }

  /** Show a state; only cells that differ from what is shown are touched. */
  render(state) {
    const n = state.cells.length;
    while (this.cells.length > n) this.drop();
    for (let i = 0; i < n; i++) {
      const cell = state.cells[i], fresh = cell.settled && cell.settledAt === state.step && state.step > 0;
      if (i >= this.cells.length) this.add(i);
      const old = this.shown[i];
      if (old && old.cell === cell && old.fresh === fresh && old.done === i < state.start) continue;
      this.paint(i, cell, fresh, i < state.start);
    }
    this.list.tabIndex = n ? -1 : 0;
    this.at = Math.min(this.at, Math.max(0, n - 1));
    this.cells.forEach(({ node }, i) => { node.tabIndex = i === this.at ? 0 : -1; });
    if (state.step !== this.step) this.follow(state.cells.findIndex((cell) => !cell.settled));
    this.step = state.step;
  }

  /** Scroll within the canvas to the first cell that is not accepted yet; -1: to the last one. */
  follow(i) {
    const node = this.cells.at(i)?.node, room = this.host;
    if (!node || room.scrollHeight <= room.clientHeight) return;
    const down = node.getBoundingClientRect().bottom - room.getBoundingClientRect().bottom + room.clientHeight / 3;
    if (i < 0 || down > 0 || down < -room.clientHeight) room.scrollTop += down;
  }

  add(i) {
    const node = element("span", "cell"), breaks = [];
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", "false");
    node.dataset.i = i;
    this.list.append(node);
    this.cells.push({ node, breaks });
  }

  drop() {
    const { node, breaks } = this.cells.pop();
    this.shown.pop();
    breaks.forEach((b) => b.remove());
    node.remove();
  }

  paint(i, cell, fresh, done) {
    const { node, breaks } = this.cells[i], what = kind(cell), noise = what === "noise";
    this.shown[i] = { cell, fresh, done };
    node.textContent = noise ? MASK : visible(cell);
    node.className = ["cell", what, `b${noise ? 0 : Math.max(1, band(cell.p))}`].join(" ");
    const blank = !noise && !cell.special && cell.text.trim() === "";
    const marks = { blank, special: cell.special && !noise, bytes: cell.bytes && !noise, forced: cell.forced && !noise,
      revised: cell.revised > 0, fresh, done, chosen: i === this.chosen };
    for (const [name, on] of Object.entries(marks)) node.classList.toggle(name, on);
    node.setAttribute("aria-label", label(cell, i));
    const wanted = noise ? 0 : lines(cell);
    while (breaks.length > wanted) breaks.pop().remove();
    while (breaks.length < wanted) {
      const line = document.createElement("br");
      (breaks.at(-1) ?? node).after(line);
      breaks.push(line);
    }
  }

  /** Show which cell the inspector tells about; -1: none. */
  choose(i) {
    this.cells[this.chosen]?.node.classList.remove("chosen");
    this.chosen = i;
    this.cells[i]?.node.classList.add("chosen");
  }

  /** Mark the cells from..to, or none. */
  mark(range) {
    this.marked = range;
    this.cells.forEach(({ node }, i) => {
      node.setAttribute("aria-selected", String(range !== null && i >= range[0] && i <= range[1]));
    });
    this.select(range);
  }

  focus(i) {
    if (!this.cells.length) return;
    if (this.cells[this.at]) this.cells[this.at].node.tabIndex = -1;
    this.at = Math.max(0, Math.min(i, this.cells.length - 1));
    const { node } = this.cells[this.at];
    node.tabIndex = 0;
    node.focus();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.cells.length - 1;
    const to = {
      ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: last,
      ArrowUp: this.line(-1), ArrowDown: this.line(1),
    }[event.key];
    if (to !== undefined) {
      const from = this.marked ? this.anchor : this.at;
      this.focus(to);
      if (event.shiftKey) this.stretch(from, this.at);
      else if (this.marked) this.mark(null);
    } else if (event.key === "Enter" || event.key === " ") {
      this.pick(this.at);
    } else if (event.key === "Escape" && this.marked) {
      this.mark(null);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  stretch(from, to) {
    this.anchor = from;
    this.mark([Math.min(from, to), Math.max(from, to)]);
  }

  /** The cell a line above (-1) or below (1) that stands closest. */
  line(direction) {
    const here = this.cells[this.at]?.node.getBoundingClientRect();
    if (!here) return this.at;
    let best = this.at, least = Infinity;
    this.cells.forEach(({ node }, i) => {
      const box = node.getBoundingClientRect(), down = direction * (box.top - here.top);
      const away = down * 1000 + Math.abs(box.left - here.left);
      if (down > 4 && away < least) [best, least] = [i, away];
    });
    return best;
  }

  down(event) {
    const i = index(event);
    if (i === null || event.button !== 0 || event.pointerType === "touch") return;
    event.preventDefault();
    if (event.shiftKey) {
      this.stretch(this.marked ? this.anchor : this.at, i);
      this.focus(i);
      return;
    }
    if (this.marked) this.mark(null);
    this.anchor = i;
    this.focus(i);
    this.pick(i);
  }

  /** A tap picks a cell; a second one begins a selection, which the next tap extends or, on its only cell, ends. */
  tapped(event) {
    const i = index(event);
    if (i === null || event.pointerType !== "touch") return;
    if (this.marked) {
      if (i === this.anchor) this.mark(null);
      else this.stretch(this.anchor, i);
    } else if (i === this.chosen) {
      this.stretch(i, i);
    } else {
      this.focus(i);
      this.pick(i);
    }
  }

  over(event) {
    const i = index(event);
    if (i !== null && event.buttons === 1 && event.pointerType !== "touch" && i !== this.anchor) this.stretch(this.anchor, i);
  }
}

/** Line ends behind a cell; the end of thinking is one as well. */
function lines(cell) {
  if (cell.special) return /(end_?|\/)think/i.test(cell.text) ? 1 : 0;
  return cell.bytes ? 0 : cell.text.split("\n").length - 1;
}

function index(event) {
  const node = event.target.closest?.(".cell");
  return node ? Number(node.dataset.i) : null;
}

export function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}
