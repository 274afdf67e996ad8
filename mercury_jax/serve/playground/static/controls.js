// The form: what the chosen model offers goes in, a request comes out.

import { element } from "./canvas.js";
import { parse } from "./decide.js";

const $ = (id) => document.getElementById(id);
const number = (id) => $(id).value.trim() === "" ? null : Number($(id).value);
export const LEFT_TO_RIGHT = "autoregressive";
const PROMPT = { chat: "Message", text: "Text to continue", edit: "Text with a hole", decide: "Text to decide about" };

export class Controls {
  /** run(): Ctrl+Enter or the button; choose(name): another model. The other listeners stay in here. */
  constructor({ run, choose }) {
    this.info = null;
    this.keepChosen = false;
    this.hole = [0, 0];
    $("compose").addEventListener("submit", (event) => { event.preventDefault(); run(); });
    $("chosen").addEventListener("change", () => choose($("chosen").value));
    $("keep").addEventListener("change", () => { this.keepChosen = true; });
    $("kinds").addEventListener("change", () => this.kindChanged());
    $("prompt").addEventListener("input", () => { $("example").hidden = true; });
    // A field that is folded away cannot be shown to be wrong.
    $("compose").addEventListener("invalid", ({ target }) => { (target.closest("details") ?? {}).open = true; }, true);
    $("efforts").addEventListener("change", () => this.effortChanged());
    $("rule").addEventListener("change", () => this.ruleChanged());
    link("p-slide", "p");
    link("temperature-slide", "temperature");
    for (const name of ["select", "keyup", "pointerup", "input"]) {
      $("prompt").addEventListener(name, ({ target }) => document.activeElement === target && this.noteHole());
    }
  }

  get kind() { return document.querySelector("input[name=kind]:checked").value; }
  get effort() { return document.querySelector("input[name=effort]:checked").value; }
  get rule() { return this.info.rules.find((r) => r.name === $("rule").value); }
  get keep() { return $("keep").checked; }
  get system() { return $("system").value.trim(); }
  get compare() { return $("compare").checked && !$("compare").disabled; }

  /** The models of the server; a single one needs no picker. */
  models(names) {
    $("chosen").replaceChildren(...options(names));
    $("models").hidden = names.length < 2;
  }

  /** Fill in what `info` says of the chosen model. What was written stays, and a rule that is not the model's own.
      talking: there are turns; a choice must neither end their conversation nor make them one. */
  offer(info, talking) {
    const first = this.info === null, rule = $("rule").value, p = $("p").value;
    const kept = !first && rule !== this.info.rules[0].name && info.rules.some((r) => r.name === rule);
    this.info = info;
    $("rule").replaceChildren(...options(info.rules.map((r) => r.name)));
    for (const name of first ? Object.keys(info.efforts) : []) {  // they are the server's, not the model's
      const item = element("label"), input = element("input");
      Object.assign(input, { type: "radio", name: "effort", value: name });
      item.append(input, element("span", "", name));
      $("efforts").append(item);
    }
    $("examples").replaceChildren(...info.examples.map((e) => this.chip(e)));
    $("max_tokens").max = info.limits.max_tokens;
    $("steps").max = info.limits.steps;
    $("temperature").placeholder = "default";
    $("compare").disabled = info.baselines.length === 0;
    document.querySelector("input[name=kind][value=edit]").disabled = !info.holes;
    if (!talking && !this.keepChosen) $("keep").checked = info.turns;
    if (first) return this.load(info.examples[0]);
    if (kept) $("rule").value = rule;
    this.ruleChanged();
    if (kept) this.setStrictness(p);
    this.effortChanged();
    if (Number($("max_tokens").value) > info.limits.max_tokens) $("max_tokens").value = info.limits.max_tokens;
    if (this.kind === "edit" && !info.holes) document.querySelector("input[name=kind][value=chat]").checked = true;
    return this.kindChanged();
  }

  chip(example) {
    const button = element("button", "chip", example.title);
    button.type = "button";
    button.addEventListener("click", () => this.load(example));
    return button;
  }

  /** Put an example into the form. */
  load(example) {
    const hole = example.kind === "infill" || example.kind === "edit";
    document.querySelector(`input[name=kind][value=${hole ? "edit" : example.kind}]`).checked = true;
    const { before = "", selected = "", after = "" } = example, box = $("prompt");
    box.value = hole ? before + selected + after : example.prompt;
    box.setSelectionRange(before.length, before.length + selected.length);
    $("max_tokens").value = example.max_tokens;
    $("example").textContent = example.about ?? "";
    $("example").hidden = !example.about;
    for (const [id, box, value] of [["schema", "grammar", example.schema], ["tools", "tools-box", example.tools]]) {
      $(id).value = value ? JSON.stringify(value) : "";
      $(box).open = Boolean(value);
    }
    $("must-call").checked = Boolean(example.tools);
    document.querySelector("input[name=effort][value='']").checked = true;
    $("rule").value = this.info.rules[0].name;
    this.ruleChanged();
    this.kindChanged([before.length, before.length + selected.length]);
  }

  /** hole: where it is, if the cursor does not say it; a browser may move the cursor of a field that was in use. */
  kindChanged(hole) {
    const gap = this.kind === "edit", decide = this.kind === "decide";
    $("prompt-label").textContent = PROMPT[this.kind];
    $("max-label").textContent = gap ? "Tokens in the hole" : "Maximum tokens";
    $("max_tokens").placeholder = gap ? "as many" : "64";
    $("grammar").hidden = gap || decide;
    $("asked").hidden = !decide;
    for (const id of ["instructions", "decoding"]) $(id).hidden = decide;
    $("compare").closest("label").hidden = decide;
    $("tools-box").hidden = this.kind !== "chat";
    $("hole").hidden = !gap;
    this.noteHole(hole);
  }

  /** What is selected in the text is what will be written anew; a bare caret is a gap. */
  noteHole(hole) {
    const box = $("prompt");
    this.hole = hole ?? [box.selectionStart, box.selectionEnd];
    const picked = box.value.slice(...this.hole);
    const cut = (text) => text.length > 24 ? `${text.slice(0, 11)} … ${text.slice(-11)}` : text;
    const line = box.value.slice(0, this.hole[0]).split("\n").length;
    $("hole").textContent = picked
      ? `To be rewritten: “${cut(picked).replaceAll("\n", "↵")}”`
      : `The hole is at the cursor, in line ${line}. Select text to rewrite it instead.`;
  }

  ruleChanged() {
    const { about, parameter, value } = this.rule;
    $("about").textContent = about.replaceAll("`", "");
    $("strict").hidden = parameter === null;
    $("p-label").textContent = parameter === "p" ? "Threshold p" : `Parameter ${parameter}`;
    $("p-slide").hidden = parameter !== "p";
    this.setStrictness(value);
  }

  setStrictness(value) {
    $("p").value = value ?? "";
    $("p-slide").value = value ?? 0;
  }

  /** An effort is a threshold and a number of passes: both are shown, and both may be changed. */
  effortChanged() {
    const chosen = this.info.efforts[this.effort];
    if (!chosen) return;
    if (this.info.rules.some((r) => r.name === "threshold")) $("rule").value = "threshold";
    this.ruleChanged();
    if (this.rule.name === "threshold") this.setStrictness(chosen.p);
    $("steps").value = Math.max(1, Math.round(chosen.steps * this.info.block));
  }

  /** The request that the form stands for. Throws an Error in words for no text, or a schema or tools that are not JSON. */
  request() {
    if (this.kind === "decide") return this.decision();
    const text = $("prompt").value, [from, to] = this.hole, gap = this.kind === "edit";
    if (!text) throw new Error("There is no text yet: write one, or choose an example.");
    const selected = gap ? text.slice(from, to) : "";
    const base = { kind: gap && !selected ? "infill" : this.kind, ...this.parameters() };
    if (this.kind === "chat") Object.assign(base, { messages: [{ role: "user", content: text }], ...this.tools() });
    else if (this.kind === "text") base.prompt = text;
    else Object.assign(base, { before: text.slice(0, from), after: text.slice(to), ...(selected && { selected }) });
    const schema = gap ? null : this.schema();
    return { ...base, ...(schema && { schema }), max_tokens: number("max_tokens") };
  }

  parameters() {
    return {
      model: this.info.model, rule: this.rule.name, p: this.rule.parameter === null ? null : number("p"), steps: number("steps"),
      temperature: number("temperature"), effort: this.effort || null, seed: number("seed") ?? 0,
    };
  }

  /** The fields `tools` and `tool_choice`, or nothing. A function may stand there with or without its wrapper. */
  tools() {
    const value = json("tools", "The list of tools");
    if (value === undefined) return {};
    if (!Array.isArray(value)) throw new Error("The tools must be a JSON list.");
    const tools = value.map((one) => one?.type === "function" ? one : { type: "function", function: one });
    return { tools, tool_choice: $("must-call").checked ? "required" : "auto" };
  }

  schema() {
    const value = json("schema", "The schema");
    if (value === undefined) return null;
    if (typeof value !== "object" || value === null || Array.isArray(value)) {
      throw new Error("The schema must be a JSON object.");
    }
    return value;
  }

  /** The body of a decision. Throws an Error in words. */
  decision() {
    const state = $("prompt").value;
    if (!state.trim()) throw new Error("There is no text to decide about");
    return { kind: "decide", model: this.info.model, state, questions: parse($("questions").value), reads: number("reads") ?? 1 };
  }

  /** Show that a run is under way: the button stops it. */
  busy(on) {
    $("run").classList.toggle("stop", on);
    $("run").replaceChildren(...(on ? ["Stop ", element("kbd", "", "Esc")] : ["Run ", element("kbd", "", "Ctrl ⏎")]));
  }
}

/** The options of a select, whose values are what they show. */
function options(names) {
  return names.map((name) => {
    const option = element("option", "", name);
    option.value = name;
    return option;
  });
}

/** The JSON of a field, undefined if it is empty. Throws an Error in words. */
function json(id, name) {
  const text = $(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`);
  }
}

/** A slider and a number that say the same. */
function link(slide, field) {
  $(slide).addEventListener("input", () => { $(field).value = $(slide).value; });
  $(field).addEventListener("input", () => { if ($(field).value) $(slide).value = $(field).value; });
}

/** The same request, decoded by the strongest opponent that can answer it; null if there is none. */
export function baseline(request, rules) {
  const cannot = !["chat", "text"].includes(request.kind) || request.schema || request.tools;
  const rule = rules.find((name) => !(cannot && name === LEFT_TO_RIGHT));
  return rule ? { ...request, rule, p: null, steps: 0 } : null;
}
