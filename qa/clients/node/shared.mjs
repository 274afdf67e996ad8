// What nano can answer, and where it is served.

export const url = process.env.MERCURY_URL;
export const model = "mercury-2";
export const sudoku = "0200\n4302\n3401\n0004";
export const solved = "1243\n4312\n3421\n2134";
export const sum = "347+585=";
export const user = (content) => [{ role: "user", content }];
// The end of text is banned by its id, so that exactly max_tokens are written.
export const endless = { logit_bias: { 3: -100 } };

export async function metric(name) {
  const text = await (await fetch(`${url}/metrics`)).text();
  const line = text.split("\n").find((l) => l.startsWith(`${name} `));
  return Number(line.split(" ")[1]);
}

// Whether the metric comes to this value within five seconds.
export async function comesTo(name, value) {
  const end = Date.now() + 5000;
  while ((await metric(name)) !== value) {
    if (Date.now() > end) return false;
    await new Promise((done) => setTimeout(done, 20));
  }
  return true;
}
