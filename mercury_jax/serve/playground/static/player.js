// The clock of the steps: where we are, whether we go on, and how fast. Knows nothing of what is shown.

export class Player {
  /** show(k): step k is to be shown. changed(): playing, paused, or more steps. */
  constructor(show, changed) {
    this.show = show;
    this.changed = changed;
    this.clear();
    this.pace = 10;  // steps a second; 0: every step as soon as it is there
  }

  clear() {
    clearTimeout(this.timer);
    Object.assign(this, { k: 0, most: 0, playing: false, live: false, timer: null });
  }

  /** A run begins, whose steps are still to come. */
  begin() {
    this.clear();
    this.live = this.playing = true;
    this.go(0);
  }

  /** So many steps are there now. */
  grow(most) {
    this.most = Math.max(this.most, most);
    if (this.playing && !this.pace) this.go(this.most);
    this.wind();
    this.changed();
  }

  /** The run is over: no further steps come. */
  finish() {
    this.live = false;
    if (this.k >= this.most) this.playing = false;
    this.changed();
  }

  go(k) {
    this.k = Math.max(0, Math.min(k, this.most));
    if (!this.live && this.k >= this.most) this.playing = false;
    this.show(this.k);
    this.changed();
  }

  /** Go to a step by hand, and stay there. */
  seek(k) {
    this.pause();
    this.go(k);
  }

  toggle() {
    if (this.playing) return this.pause();
    if (this.k >= this.most && !this.live) this.go(0);
    this.playing = this.live || this.most > 0;
    this.wind();
    return this.changed();
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.playing = false;
    this.changed();
  }

  wind() {
    if (this.timer !== null || !this.playing || this.k >= this.most) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      if (!this.playing) return;
      this.go(this.k + 1);
      this.wind();
    }, this.pace ? 1000 / this.pace : 0);
  }
}
