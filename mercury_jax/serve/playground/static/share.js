// A trace in the address of the page, behind "#trace=": a link that replays it. Browsers do not send that part to any
// server.

const MARK = "#trace=", LONGEST = 60_000, MOST = 8_000_000;  // characters of a link, bytes of a trace

/** The link of exported runs. Throws an Error in words where it would be too long. */
export async function linkOf(text, page) {
  const packed = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(text));
  const coded = btoa(Array.from(packed, (byte) => String.fromCharCode(byte)).join(""));
  const link = page.split("#")[0] + MARK + coded.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  if (link.length > LONGEST) throw new Error("This run is too long for a link. Export writes it to a file.");
  return link;
}

/** The text of the runs in an address, or null where it has none. Throws an Error in words where it is damaged. */
export async function ofLink(hash) {
  if (!hash.startsWith(MARK)) return null;
  try {
    const coded = atob(hash.slice(MARK.length).replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = await through(new DecompressionStream("deflate-raw"), Uint8Array.from(coded, (c) => c.charCodeAt(0)));
    return new TextDecoder().decode(bytes);
  } catch {
    throw new Error("The trace in this link is damaged.");
  }
}

async function through(stream, bytes) {
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader(), parts = [];
  let size = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > MOST) throw new Error("too large");
    parts.push(value);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}
