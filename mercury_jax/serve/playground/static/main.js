// The page: joins the form, the runs, the clock and the inspector.

import * as api from "./api.js";
import { element } from "./canvas.js";
import { Controls, LEFT_TO_RIGHT, baseline } from "./controls.js";
import { Conversation } from "./conversation.js";
import { show as showDecision } from "./decide.js";
import { Inspector } from "./inspector.js";
import { legend } from "./legend.js";
import { Player } from "./player.js";
import { Race, faster } from "./race.js";
import { rewriting } from "./rewrite.js";
import { Run } from "./run.js";
import { linkOf, ofLink } from "./share.js";
import { Trace, counted, exported, fewer, figures, imported } from "./trace.js";

const $ = (id) => document.getElementById(id);
const OPPONENT = { [LEFT_TO_RIGHT]: "Left to right, KV cache", confidence: "One token per step" };
const NARROW = matchMedia("(max-width: 900px)");  // the answer stands above the form
const WAITING = {
  "warming up": "The server compiles its programs. It answers when it is done",
  closing: "The server is shutting down. The page goes on when it is back",
  lost: "The server does not answer: it has stopped, it loads a model, or the connection is lost. Trying again",
};
const SILENT = 20_000;  // ms without a sign of life; the server gives one every 15 s
const RECORDED = "A recording: the embedded model solves a Sudoku on two CPU cores. Run asks this server.";
const handlers = { pick: (run, i) => inspect(run, i), select: (run, range) => offerRewrite(run, range) };
const main = new Run("main", "Answer", handlers), beside = new Run("beside", OPPONENT[LEFT_TO_RIGHT], handlers);
const inspector = new Inspector($("inspector"));
const controls = new Controls({ run: () => running ? stop() : start(compose()), choose });
const player = new Player(show, refresh);
const conversation = new Conversation($("turns"), () => note(""), (request) => start(request));
const race = new Race((text) => { $("where").textContent = text; }, () => { player.seek(player.most); });
const verdict = element("p", "verdict");
const infos = new Map();  // by the name of the model; `info` is of the chosen one
let info = null, running = null, looked = null, both = false, waits = false;

const runs = () => both ? [main, beside] : [main];

async function begin() {
  let first;
  try {
    first = await api.info();
    // All at once: from then on a choice is a matter of the page alone, and no request goes to the model before it.
    const others = await Promise.all(first.models.slice(1).map((name) => api.info(name)));
    infos.clear();
    for (const one of [first, ...others]) infos.set(one.model, one);
  } catch (error) {
    info = null;
    if (error.lost) return wait().then(begin);
    $("lock").hidden = error.status !== 401;
    if (error.status === 401) return $("key").focus();
    return complain(error);
  }
  $("lock").hidden = !first.locked;
  controls.models(first.models);
  choose(first.model);
  return wait();
}

/** Fill the form and the header in for a model. The conversation goes on: its next message is for this model. */
function choose(name) {
  info = infos.get(name);
  const size = `${short(info.parameters)} parameters, blocks of ${info.block}`;
  $("model").replaceChildren(element("b", "", info.model), ` ${size}`);
  controls.offer(info, conversation.turns.length > 0);
}

/** Say what the server does, until it answers requests. */
async function wait(signal = null) {
  let began = performance.now(), last = "";
  for (let state = await api.state(); state !== "ready" && !signal?.aborted; state = await api.state()) {
    if (state !== last) [began, last] = [performance.now(), state];
    say(WAITING[state] ?? WAITING.lost, began);
    await new Promise((go) => setTimeout(go, 500));
  }
  hush();
}

/** Say what the page waits for, and how long already; `hush` ends it. Screen readers hear a change of the words alone. */
function say(text, began) {
  const said = `${text}: `, seconds = `${Math.round((performance.now() - began) / 1000)} s so far.`;
  if (!waits || $("note").firstChild?.data !== said) {
    note(said);
    $("note").append(element("span"));
    $("note").lastChild.ariaHidden = "true";
  }
  $("note").lastChild.textContent = seconds;
  waits = true;
}

function hush() {
  if (waits) note("");
}

function note(text) {
  waits = false;
  $("note").hidden = !text;
  $("note").textContent = text;
}

const short = (n) => n.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });

function complain(error) {
  $("error").hidden = error === null;
  $("error").textContent = error?.message ?? "";
  if (error) $("error").scrollIntoView({ block: "nearest" });
}

/** The request of the form, or null with the reason shown. */
function compose() {
  try {
    const request = info && controls.request();
    if (request?.kind === "chat") {
      const [{ content }] = request.messages;
      request.messages = conversation.messages(content, controls.system, controls.keep);
    }
    return request;
  } catch (error) {
    complain(error);
    return null;
  }
}

async function start(request) {
  if (!request || running) return;
  complain(null);
  note("");
  race.stop();
  stage(request.kind === "decide");
  if (request.kind === "decide") return decide(request);
  // Results of tools go to the model that called them, which need not be the chosen one.
  const one = infos.get(request.model) ?? info;
  const other = controls.compare ? baseline(request, one.baselines) : null;
  both = other !== null;
  running = new AbortController();
  controls.busy(true);
  setUp(main, request, name(request));
  if (both) setUp(beside, other, OPPONENT[other.rule]);
  lay();
  if (NARROW.matches) $("stage").scrollIntoView();
  player.begin();
  await wait(running.signal);
  // One after the other, so that neither waits for the other while its time is taken.
  for (const run of runs()) {
    await follow(run, running.signal);
    if (run.failed) break;
  }
  running = null;
  controls.busy(false);
  player.finish();
  if (main.trace.end && !main.failed && main.trace.end.finish !== "error") conversation.add(main.trace, controls.keep, infos.size > 1);
  tell();
}

/** What the stage shows: the bars of a decision, or the runs with their steps. */
function stage(decision) {
  for (const id of ["runs", "transport", "lower"]) $(id).hidden = decision;
  $("decided").hidden = !decision;
}

async function decide({ kind, ...body }) {
  running = new AbortController();
  controls.busy(true);
  await wait(running.signal);
  const began = performance.now(), clock = setInterval(() => say("The questions are read", began), 500);
  try {
    const answer = await api.decide(body, running.signal);
    showDecision($("decided"), answer, performance.now() - began);
    $("said").textContent = [...$("decided").querySelectorAll(".decision")].map((one) => `${one.querySelector("h3").textContent} ${one.querySelector(".hidden").textContent}`).join(". ");
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
  }
  clearInterval(clock);
  hush();
  running = null;
  controls.busy(false);
}

function setUp(run, request, title) {
  run.take(new Trace(request), title);
}

function name({ model, rule, p, effort }) {
  return [infos.size > 1 ? `${model}:` : "", rule, p !== null && p !== undefined ? `${p}` : "", effort ? `(${effort})` : ""].filter(Boolean).join(" ");
}

async function follow(run, signal) {
  const began = performance.now();
  let heard = began;
  const clock = setInterval(() => {
    if (performance.now() - heard > SILENT) say("Nothing comes from the server: the connection may be lost. Stop ends the wait", heard);
    else if (run.trace.length === 0) say(pending(run.trace), began);
    else hush();
  }, 1000);
  try {
    await api.stream(run.trace.request, (event) => {
      run.trace.push(event);
      if (event.type === "frame") player.grow(run.trace.length);
      else show(player.k);
      if (event.type === "end" && event.finish === "error") complain(new Error(event.message));
      hush();
    }, () => { heard = performance.now(); }, signal);
  } catch (error) {
    run.failed = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") complain(error);
  } finally {
    clearInterval(clock);
    hush();
  }
}

/** What a run waits for that has no pass yet. */
function pending({ start, request }) {
  if (!start) return request.schema || request.tools ? "The server compiles the grammar of the answer" : "The request is sent";
  if (start.ahead) return `Queued: ${counted(start.ahead, "request")} before this one`;
  return "The server reads the prompt, or compiles a program for its length, which happens once";
}

function stop() {
  running?.abort();
}

/** The cards on the stage, and the sentence that compares them. */
function lay() {
  $("lower").prepend($("inspector"));
  $("runs").replaceChildren(...runs().map((run) => run.node), ...(both ? [verdict] : []));
  $("runs").classList.toggle("two", both);
  verdict.replaceChildren();
  inspector.clear();
  looked = null;
  show(0);
}

function show(k) {
  race.stop();
  for (const run of runs()) run.show(k);
  compare(k);
  if (looked && !player.playing) inspect(...looked);
}

/** How the two runs stand at step k, and at the end what the difference was. */
function compare(k) {
  if (!both) return;
  const [a, b] = runs().map((run) => figures(run.trace.state(k)));
  const over = !running && runs().every((run) => run.trace.end && !run.failed && k >= run.trace.length);
  if (!over) {
    const steps = counted(k, "step"), here = counted(a.settled, "token"), there = counted(b.settled, "token");
    return void verdict.replaceChildren(k ? `After ${steps}: ${here} here, ${there} ${beside.trace.start?.rule === LEFT_TO_RIGHT ? "left to right" : "with one token per step"}.` : "");
  }
  const same = main.trace.end.text === beside.trace.end.text ? "Both wrote the same text." : "The texts differ.";
  verdict.replaceChildren(element("b", "", fewer(a.forwards, b.forwards)), ` ${faster(main.trace, beside.trace)} ${same}`);
}

function refresh() {
  const { k, most, playing, live } = player, slider = $("slider");
  slider.max = most;
  slider.value = k;
  slider.setAttribute("aria-valuetext", `step ${k} of ${most}`);
  $("where").textContent = most || live ? `step ${k} of ${most}${live ? " …" : ""}` : "no steps yet";
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  $("play").classList.toggle("playing", playing);
  for (const id of ["first", "back"]) $(id).disabled = k === 0;
  for (const id of ["next", "last"]) $(id).disabled = k >= most;
  $("play").disabled = most === 0 && !live;
  slider.disabled = most === 0;
  for (const id of ["export", "share"]) $(id).disabled = most === 0 || running !== null;
  $("race").disabled = most === 0 || running !== null || !both;
  if (!playing && k === most) compare(k);
}

/** Read out the answer, once it is there. */
function tell() {
  const { end } = main.trace;
  refresh();
  show(player.k);
  const calls = (end?.calls ?? []).map((call) => `calls ${call.function.name}`);
  const written = [end?.text, ...calls].filter(Boolean).join(", ");
  if (end) $("said").textContent = `Answer, ${counted(end.tokens, "token")} in ${counted(end.forwards, "forward pass", "forward passes")}: ${written}`;
}

function inspect(run, i) {
  looked = [run, i];
  if (NARROW.matches) run.node.after($("inspector"));  // what tells of a token stands next to it
  for (const one of runs()) one.canvas.choose(one === run ? i : -1);
  if (player.playing && !running) player.pause();
  inspector.show(run, i, player.k, infos);
}

/** The button that rewrites what is selected in a finished answer. */
function offerRewrite(run, range) {
  run.node.querySelector(".rewrite")?.remove();
  if (!range || running || !run.trace.end || !info?.holes || run.trace.request === null) return;
  const count = range[1] - range[0] + 1;
  const button = element("button", "rewrite primary", `Rewrite ${counted(count, "token")}`);
  button.type = "button";
  button.addEventListener("click", () => {
    try {
      player.seek(player.most);
      start(rewriting(run.trace, run.trace.state(run.trace.length).cells, range, controls.parameters()));
    } catch (error) {
      complain(error);
    }
  });
  run.node.append(button);
}

/** The runs on the stage as the text of a file. */
function kept() {
  return exported(runs().map((run) => run.trace).filter((trace) => trace.start), new Date().toISOString());
}

async function share() {
  try {
    const link = await linkOf(kept(), location.href);
    await navigator.clipboard.writeText(link);
    note("The link is in the clipboard. It holds every step; the server does not keep it.");
  } catch (error) {
    complain(error);
  }
}

function download() {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([kept()], { type: "application/json" }));
  link.download = `trace-${main.trace.start?.model ?? "model"}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Show the runs of a text that `exported` wrote: of a file, a link, or the recording of the first page. */
function replay(text) {
  if (running) return;
  race.stop();
  stage(false);
  try {
    const traces = imported(text);
    complain(null);
    both = traces.length === 2;
    const title = (trace, i) => i ? OPPONENT[trace.start.rule] ?? `${trace.start.rule}` : `${trace.start.model ?? "a model"}, recorded`;
    traces.forEach((trace, i) => runs()[i].take(trace, title(trace, i)));
    player.clear();
    lay();
    player.grow(Math.max(...traces.map((t) => t.length)));
    player.seek(player.most);
  } catch (error) {
    complain(error);
  }
}

/** What stands on the stage at first sight: the runs of the link, else a recording. */
async function greet() {
  try {
    const linked = await ofLink(location.hash);
    replay(linked ?? await (await fetch("playground/static/demo.json")).text());
    const by = main.trace.start?.model ?? "a model that it does not name";
    note(linked ? `The steps of this link, by ${by}. Run asks this server.` : RECORDED);
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) player.toggle();
  } catch (error) {
    complain(error);
  }
}

function keys(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    return void start(compose());
  }
  if (event.key === "Escape" && running) return stop();
  const own = event.target.closest("input, textarea, select, button, summary, [role=option]");
  if (own || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const by = (n) => () => player.seek(player.k + n);
  const act = { ArrowLeft: by(-1), ArrowRight: by(1), " ": () => player.toggle() }[event.key];
  if (!act) return undefined;
  event.preventDefault();
  return act();
}

/** Set the parts in the order in which they are seen, so that the focus moves in it too. */
function place() {
  const main = $("stage").parentElement, knobs = $("knobs");
  $("legend-box").open = !NARROW.matches;
  if (NARROW.matches) {
    main.prepend($("stage"));
    knobs.after($("ask"));
  } else {
    main.append($("stage"));
    knobs.before($("ask"));
  }
}

function listen() {
  const on = (id, what, act) => $(id).addEventListener(what, act);
  on("race", "click", () => { player.pause(); race.start(runs()); });
  on("share", "click", share);
  on("first", "click", () => player.seek(0));
  on("back", "click", () => player.seek(player.k - 1));
  on("play", "click", () => player.toggle());
  on("next", "click", () => player.seek(player.k + 1));
  on("last", "click", () => player.seek(player.most));
  on("slider", "input", (event) => player.seek(Number(event.target.value)));
  on("pace", "change", (event) => { player.pace = Number(event.target.value); });
  on("export", "click", download);
  on("import", "click", () => $("file").click());
  on("file", "change", (event) => { read(event.target.files[0]); event.target.value = ""; });
  on("key", "change", (event) => { api.useKey(event.target.value); complain(null); begin(); });
  document.addEventListener("keydown", keys);
  NARROW.addEventListener("change", place);
}

async function read(file) {
  if (file) replay(await file.text());
  note("");
}

legend($("legend"));
place();
lay();
refresh();
listen();
greet();
begin();
