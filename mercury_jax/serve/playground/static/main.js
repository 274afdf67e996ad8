// The page: joins the form, the runs, the clock and the inspector.

import * as api from "./api.js";
import { element } from "./canvas.js";
import { Controls, baseline } from "./controls.js";
import { Inspector } from "./inspector.js";
import { legend } from "./legend.js";
import { Player } from "./player.js";
import { rewriting } from "./rewrite.js";
import { Run } from "./run.js";
import { Trace, exported, figures, imported } from "./trace.js";

const $ = (id) => document.getElementById(id);
const handlers = { pick: (run, i) => inspect(run, i), select: (run, range) => offerRewrite(run, range) };
const main = new Run("main", "Answer", handlers), beside = new Run("beside", "One token a step", handlers);
const inspector = new Inspector($("inspector"));
const controls = new Controls({ run: () => running ? stop() : start(compose()) });
const player = new Player(show, refresh);
const verdict = element("p", "verdict");
let info = null, running = null, looked = null, both = false;

const runs = () => both ? [main, beside] : [main];

async function begin() {
  info = null;
  try {
    info = await api.info();
  } catch (error) {
    $("lock").hidden = error.status !== 401;
    if (error.status === 401) return $("key").focus();
    return complain(error);
  }
  $("lock").hidden = !info.locked;
  const size = `${short(info.parameters)} parameters, blocks of ${info.block}`;
  $("model").replaceChildren(element("b", "", info.model), ` ${size}`);
  controls.offer(info);
  return complain(null);
}

const short = (n) => n.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });

function complain(error) {
  $("error").hidden = error === null;
  $("error").textContent = error?.message ?? "";
}

/** The request of the form, or null with the reason shown. */
function compose() {
  try {
    return info && controls.request();
  } catch (error) {
    complain(error);
    return null;
  }
}

async function start(request) {
  if (!request || running) return;
  complain(null);
  both = controls.compare;
  running = new AbortController();
  controls.busy(true);
  setUp(main, request, name(request));
  if (both) setUp(beside, baseline(request, info.baseline), "One token a step");
  lay();
  player.begin();
  const signal = running.signal;
  // Holes are filled one after the other, so that neither waits for the other while its time is taken.
  if (request.before !== undefined) for (const run of runs()) await follow(run, signal);
  else await Promise.all(runs().map((run) => follow(run, signal)));
  running = null;
  controls.busy(false);
  player.finish();
  tell();
}

function setUp(run, request, title) {
  run.take(new Trace(request), title);
}

function name({ rule, p, effort }) {
  return [rule, p !== null && p !== undefined ? `${p}` : "", effort ? `(${effort})` : ""].filter(Boolean).join(" ");
}

async function follow(run, signal) {
  try {
    await api.stream(run.trace.request, (event) => {
      run.trace.push(event);
      if (event.type === "frame") player.grow(run.trace.length);
      else show(player.k);
      if (event.type === "end" && event.finish === "error") complain(new Error(event.message));
    }, signal);
  } catch (error) {
    run.failed = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") complain(error);
  }
}

function stop() {
  running?.abort();
}

/** The cards on the stage, and the sentence that compares them. */
function lay() {
  $("runs").replaceChildren(...runs().map((run) => run.node), ...(both ? [verdict] : []));
  $("runs").classList.toggle("two", both);
  verdict.replaceChildren();
  inspector.clear();
  looked = null;
  show(0);
}

function show(k) {
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
    const count = (n) => `${n} token${n === 1 ? "" : "s"}`;
    const steps = `${k} step${k === 1 ? "" : "s"}`, here = count(a.settled), there = count(b.settled);
    return void verdict.replaceChildren(k ? `After ${steps}: ${here} here, ${there} with one token a step.` : "");
  }
  const ratio = (b.forwards / a.forwards).toLocaleString("en", { maximumSignificantDigits: 2 });
  const same = main.trace.end.text === beside.trace.end.text ? "Both wrote the same text." : "The texts differ.";
  const fewer = `${a.forwards} forwards instead of ${b.forwards}: ${ratio} times fewer.`;
  verdict.replaceChildren(element("b", "", fewer), ` ${same}`);
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
  $("export").disabled = most === 0 || running !== null;
  if (!playing && k === most) compare(k);
}

/** Read out the answer, once it is there. */
function tell() {
  const { end } = main.trace;
  refresh();
  show(player.k);
  if (end) $("said").textContent = `Answer, ${end.tokens} tokens in ${end.forwards} forwards: ${end.text}`;
}

function inspect(run, i) {
  looked = [run, i];
  for (const one of runs()) one.canvas.choose(one === run ? i : -1);
  if (player.playing && !running) player.pause();
  inspector.show(run, i, player.k, info?.model);
}

/** The button that rewrites what is selected in a finished answer. */
function offerRewrite(run, range) {
  run.node.querySelector(".rewrite")?.remove();
  if (!range || running || !run.trace.end || !info?.holes || run.trace.request === null) return;
  const count = range[1] - range[0] + 1;
  const button = element("button", "rewrite primary", `Rewrite ${count} token${count > 1 ? "s" : ""}`);
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

function download() {
  const kept = runs().map((run) => run.trace).filter((trace) => trace.start);
  const text = exported(kept, new Date().toISOString());
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `trace-${main.trace.start?.model ?? "model"}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function upload(file) {
  if (!file || running) return;
  try {
    const traces = imported(await file.text());
    complain(null);
    both = traces.length === 2;
    const title = (trace, i) => i ? "One token a step" : `${trace.start.model ?? "a model"}, recorded`;
    traces.forEach((trace, i) => runs()[i].take(trace, title(trace, i)));
    player.clear();
    lay();
    player.grow(Math.max(...traces.map((t) => t.length)));
    player.seek(player.most);
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

function listen() {
  const on = (id, what, act) => $(id).addEventListener(what, act);
  on("first", "click", () => player.seek(0));
  on("back", "click", () => player.seek(player.k - 1));
  on("play", "click", () => player.toggle());
  on("next", "click", () => player.seek(player.k + 1));
  on("last", "click", () => player.seek(player.most));
  on("slider", "input", (event) => player.seek(Number(event.target.value)));
  on("pace", "change", (event) => { player.pace = Number(event.target.value); });
  on("export", "click", download);
  on("import", "click", () => $("file").click());
  on("file", "change", (event) => { upload(event.target.files[0]); event.target.value = ""; });
  on("key", "change", (event) => { api.useKey(event.target.value); begin(); });
  document.addEventListener("keydown", keys);
}

legend($("legend"));
lay();
refresh();
listen();
begin();
