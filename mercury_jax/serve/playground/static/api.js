// The routes: the form's data, a stream of frames, the most probable tokens of a cell, decisions.

const BROKEN = "The connection broke before the answer was complete. Run asks again.";

let key = "";

/** The API key of later calls; it lives in this module and nowhere else. */
export function useKey(text) {
  key = text.trim();
}

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** `fetch`, whose failures are an Error in words with the field `lost`. */
async function call(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : lost("The server does not answer: it has stopped, or the connection is lost.");
  }
}

function lost(message) {
  return Object.assign(new Error(message), { lost: true });
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
  const response = await call(`playground/info${asked}`, { headers: headers() });
  return response.ok ? response.json() : refuse(response);
}

async function post(path, body, signal) {
  const response = await call(path, {
    method: "POST", signal, body: JSON.stringify(body), headers: headers({ "Content-Type": "application/json" }),
  });
  return response.ok ? response : refuse(response);
}

/** "ready", "warming up" (it answers no request before its programs are compiled), "closing" or "lost". */
export async function state() {
  try {
    return (await (await fetch("ready", { headers: headers() })).json()).status ?? "lost";
  } catch {
    return "lost";
  }
}

/** The five most probable tokens of a cell: {top: [{id, text, kind, p}], exact}. */
export async function top(body, signal) {
  return (await post("playground/top", body, signal)).json();
}

/** Answers to typed questions, as /v1/decisions has them. */
export async function decide(body, signal) {
  return (await post("v1/decisions", body, signal)).json();
}

/** Calls `take(event)` for each event, and `heard()` for whatever comes, the server's signs of life included. Ends after
    the last event. Throws what the server refused, or a broken stream. */
export async function stream(body, take, heard, signal) {
  const response = await post("playground/stream", body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : lost(BROKEN);
    });
    if (done) break;
    heard();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const text of events) {
      if (!text.startsWith("data: ")) continue;
      const event = JSON.parse(text.slice(6));
      ended ||= event.type === "end";
      take(event);
    }
  }
  if (!ended) throw lost(BROKEN);
}
