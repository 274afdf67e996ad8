// Tokens of an answer, selected to be written anew: the request that does it.

import { textOf } from "./trace.js";

/** Asks for cells from..to of a finished run again. Throws an Error in words where that cannot be asked. */
export function rewriting(trace, cells, [from, to], parameters) {
  const inside = cells.slice(from, to + 1);
  if (inside.some((c) => c.special)) throw new Error("A control token cannot be rewritten: select text.");
  if (cells.slice(to + 1).some((c) => c.special)) {
    throw new Error("Thinking cannot be rewritten: select text of the answer.");
  }
  const begin = cells.slice(0, from).findLastIndex((c) => c.special) + 1;
  const before = textOf(cells.slice(begin, from)), after = textOf(cells.slice(to + 1)), old = trace.request;
  const selected = textOf(inside);
  if ([before, selected, after].some((text) => text.includes("\uFFFD"))) {
    throw new Error("The selection cuts a character in two.");
  }
  const request = { kind: "edit", ...parameters, selected, max_tokens: inside.length };
  const around = { before: (old.prompt ?? old.before ?? "") + before, after: after + (old.after ?? "") };
  return { ...request, ...around, ...(old.messages && { messages: old.messages, tools: old.tools }) };
}
