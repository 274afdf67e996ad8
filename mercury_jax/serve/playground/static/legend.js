// The legend: one example cell of each kind.

import { MASK, element } from "./canvas.js";

const LEGEND = [
  ["noise b0", MASK, "noise: not decoded yet"], ["guess b2", "guess", "most probable token, not accepted yet"],
  ["settled b5", "token", "accepted (solid border)"], ["settled b5 fresh", "token", "accepted in this step"],
  ["settled b4 revised", "token", "changed after it was accepted"],
  ["settled b5 forced", "token", "forced: the only token the grammar allowed"],
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
