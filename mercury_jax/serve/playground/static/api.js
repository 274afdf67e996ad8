// The three routes: the form's data, a stream of frames, the most probable tokens of a cell.

let key = "";

/** The API key of later calls; it lives in this module and nowhere else. */
export function useKey(text) {
  key = text.trim();
}

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function refuse(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const { error } = await response.json();
    if (typeof error?.message === "string") message = error.message;
  } catch { /* not JSON: only the status is shown */ }
  const after = response.headers.get("retry-after");
  const error = new Error(after ? `${message} Try again in ${after} s.` : message);
  error.status = response.status;
  throw error;
}

/** What `GET /playground/info` says of a model, and the names of all; without a name of the first one. */
export async function info(model = null) {
  const asked = model === null ? "" : `?model=${encodeURIComponent(model)}`;
  const response = await fetch(`playground/info${asked}`, { headers: headers() });
  return response.ok ? response.json() : refuse(response);
}

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", signal, body: JSON.stringify(body), headers: headers({ "Content-Type": "application/json" }),
  });
  return response.ok ? response : refuse(response);
}

/** Whether the server has compiled its programs; it answers no request before that. */
export async function ready() {
  return (await fetch("ready", { headers: headers() })).ok;
}

/** The five most probable tokens of a cell: {top: [{id, text, kind, p}], exact}. */
export async function top(body, signal) {
  return (await post("playground/top", body, signal)).json();
}

/** Calls `take(event)` for each event; ends after the last one. Throws what the server refused, or a broken stream. */
export async function stream(body, take, signal) {
  const response = await post("playground/stream", body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const text of events) {
      if (!text.startsWith("data: ")) continue;
      const event = JSON.parse(text.slice(6));
      ended ||= event.type === "end";
      take(event);
    }
  }
  if (!ended) throw new Error("The connection broke before the answer was complete.");
}
