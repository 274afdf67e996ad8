// A race by wall clock: two runs replayed at the times at which their passes ended, slower where they were too fast to
// watch. Each of them had the server to itself, one after the other.

import { ratio } from "./trace.js";

const LONG = 3000;  // ms that the slower run takes on the page, at least

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;

/** The milliseconds of a run, from its request to its last pass. */
export function duration(trace) {
  return trace.frames.at(-1)?.ms ?? 0;
}

/** "0.05 s instead of 0.41 s: 8.2 times as fast.", or "" where a run has no times. */
export function faster(a, b) {
  const [here, there] = [duration(a), duration(b)];
  if (!here || !there) return "";
  const times = here < there ? ratio(here, there) : ratio(there, here);
  const verdict = times ? `${times} times as ${here < there ? "fast" : "long"}` : "about as fast";
  return `${seconds(here)} instead of ${seconds(there)}: ${verdict}.`;
}

export class Race {
  /** say(text): where the clock is shown. over(): the slower run has arrived. */
  constructor(say, over) {
    this.say = say;
    this.over = over;
    this.frame = null;
  }

  get running() { return this.frame !== null; }

  start(runs) {
    this.stop();
    const longest = Math.max(...runs.map((run) => duration(run.trace)));
    const slow = longest < LONG ? Math.ceil(LONG / Math.max(longest, 1)) : 1, began = performance.now();
    const tick = (now) => {
      const ms = Math.min((now - began) / slow, longest);
      for (const run of runs) {
        const own = Math.min(ms, duration(run.trace));
        run.show(run.trace.frames.findLastIndex((frame) => frame.ms <= ms) + 1);
        run.clock(seconds(own), ms >= duration(run.trace));
      }
      this.say(seconds(ms) + (slow > 1 ? `, shown ${slow} times slower` : ""));
      if (ms < longest) {
        this.frame = requestAnimationFrame(tick);
        return;
      }
      this.frame = null;
      this.over();
    };
    this.frame = requestAnimationFrame(tick);
  }

  stop() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
  }
}
