// What the looks of a cell mean, shown by cells that look so.

import { MASK, element } from "./canvas.js";

const LEGEND = [
  ["noise b0", MASK, "noise: nothing to read yet"], ["guess b2", "guess", "a guess, which may still change"],
  ["settled b5", "token", "settled: a solid border"], ["settled b5 fresh", "token", "settled in this step"],
  ["settled b4 revised", "token", "revised after it was settled"],
  ["settled b5 forced", "token", "forced: the grammar left no choice"],
];

/** Write the legend: one cell of each kind, and the bands of confidence. */
export function legend(host) {
  const rows = LEGEND.map(([classes, text, about]) => {
    const item = element("li");
    item.append(element("span", `cell ${classes}`, text), element("span", "", about));
    return item;
  });
  const scale = element("li", "scale");
  for (const [i, from] of [".25", ".5", ".75", ".9", ".99"].entries()) {
    scale.append(element("span", `cell guess b${i + 1}`, from));
  }
  scale.append(element("span", "", "confidence, from"));
  host.replaceChildren(...rows, scale);
}
