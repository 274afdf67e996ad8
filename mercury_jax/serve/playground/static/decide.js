// Typed questions about a text: the lines of the form go to /v1/decisions, bars with intervals come back.

import { element } from "./canvas.js";

const Z = 1.96;  // of a two-sided interval of 95%

/** The questions of the lines, by the line: yes or no, labels divided by |, levels divided by <. Throws an Error in words. */
export function parse(text) {
  const questions = {};
  for (const line of text.split("\n").map((one) => one.trim()).filter(Boolean)) {
    const mark = line.indexOf("?"), asked = mark < 0 ? "" : line.slice(0, mark + 1), rest = line.slice(mark + 1).trim();
    const divided = (by) => rest.split(by).map((one) => one.trim()).filter(Boolean);
    if (!/[|<]/.test(rest)) questions[line] = { type: "noul", instructions: line };
    else if (rest.includes("|")) questions[line] = { type: "choice", instructions: asked, criteria: Object.fromEntries(divided("|").map((one) => [one, null])) };
    else questions[line] = { type: "score", instructions: asked, criteria: divided("<") };
  }
  if (Object.keys(questions).length === 0) throw new Error("There is no question: write one a line");
  return questions;
}

/** Show the answers in `node`, a group of bars for each question. */
export function show(node, answer, milliseconds) {
  const { answers, usage } = answer;
  node.replaceChildren(...Object.entries(answers).map(([name, one]) => group(name, one)));
  const read = `${usage.input_tokens} tokens read in ${Math.round(milliseconds)} ms`;
  node.append(element("p", "hint", `${read}. The lines are intervals of 95% of the mean over the reads.`));
}

function group(name, one) {
  const box = element("div", "decision"), list = element("ul", "bars");
  const p = one.type === "noul" ? { yes: one.noul, no: 1 - one.noul } : one.probabilities;
  const best = Object.keys(p).reduce((a, b) => p[b] > p[a] ? b : a);
  list.append(...Object.keys(p).map((label) => bar(text(one, label), p[label], one.standard_errors?.[label] ?? 0, label === best)));
  const score = one.type === "score" ? `, ${one.score.toFixed(2)} on average` : "";
  box.append(element("h3", "", name), list, element("p", "hidden", `${text(one, best)}${score}`));
  return box;
}

const text = (one, label) => one.type === "score" ? `${label}: ${one.legend[label]}` : label;

function bar(label, p, error, own) {
  const row = element("li", own ? "own" : ""), fill = element("span", "fill spread");
  fill.style.setProperty("--p", p);
  fill.style.setProperty("--low", Math.max(0, p - Z * error));
  fill.style.setProperty("--wide", Math.min(1, p + Z * error) - Math.max(0, p - Z * error));
  const spread = error ? ` ± ${(100 * Z * error).toFixed(1)}` : "";
  row.append(element("code", "", label), fill, element("span", "value", `${(100 * p).toFixed(1)}${spread} %`));
  return row;
}
