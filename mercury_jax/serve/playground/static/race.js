// A race by wall clock: two runs replayed at the times at which their passes ended, slower where they were too fast to
// watch. Each of them had the server to itself, one after the other.

const LONG = 3000;  // ms that the slower run takes on the page, at least

const time = (ms) => ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;

/** The milliseconds of a run, from its request to its last pass. */
export function duration(trace) {
  return trace.frames.at(-1)?.ms ?? 0;
}

/** "28 ms instead of 41 ms: 1.5 times as fast.", or "" where a run has no times. */
export function faster(a, b) {
  const [here, there] = [duration(a), duration(b)];
  if (!here || !there) return "";
  return `${time(here)} instead of ${time(there)}${ratio(there / here, "as fast", "as slow")}.`;
}

/** ": 1.5 times as fast", ": 1.2 times as slow" where the number is below 1, "" where it is about 1. */
export function ratio(x, more, less) {
  const times = Math.max(x, 1 / x).toLocaleString("en", { maximumSignificantDigits: 2 });
  return times === "1" ? "" : `: ${times} times ${x > 1 ? more : less}`;
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
        run.clock(time(own), ms >= duration(run.trace));
      }
      this.say(time(ms) + (slow > 1 ? `, shown ${slow} times slower` : ""));
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
