/* Draws one step: accepted tokens in the colour of the step that accepted them, guesses in blue by their confidence.
   `html.py` replaces ID, as in steps.css. */
(function () {
  const root = document.getElementById("ID");
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const text = root.querySelector(".m-text"), caption = root.querySelector(".m-step");
  const slider = root.querySelector("input"), play = root.querySelector("button");
  const last = data.steps.length - 1, pace = Math.max(120, Math.min(700, 4000 / last));
  let timer = null;

  function cell(label, since, p, masked) {
    const span = document.createElement("span"), held = since > 0;
    span.title = (held ? "accepted in step " + since : "a guess") + ", probability " + p.toFixed(2);
    if (masked || (!held && p < data.unknown)) {
      span.textContent = data.noise;
      span.className = "m-noise";
      return span;
    }
    span.textContent = label[1] ? "\u27e8" + label[0] + "\u27e9" : label[0];
    span.className = label[1] ? "m-special" : "";
    const hue = 280 - 240 * (data.of > 1 ? (since - 1) / (data.of - 1) : 1);
    span.style.background = held ? "hsla(" + hue + ", 70%, 50%, .35)" : "rgba(0, 150, 215, " + (0.05 + 0.3 * p) + ")";
    span.style.fontStyle = held || label[1] ? "" : "italic";
    return span;
  }
  function draw(k) {
    const step = data.steps[k];
    text.textContent = "";
    step.t.forEach((t, i) => t >= 0 && text.appendChild(
      cell(data.labels[t], step.s[i], step.c[i] / 100, t === data.mask)));
    const held = step.s.filter((since) => since > 0).length;
    caption.textContent = "step " + step.n + " of " + data.of + ": " +
      held + " of " + step.t.length + " tokens accepted";
    slider.value = k;
  }
  function stop() { clearInterval(timer); timer = null; play.textContent = "play"; }
  play.onclick = function () {
    if (timer) return stop();
    let k = +slider.value >= last ? 0 : +slider.value;
    draw(k);
    play.textContent = "pause";
    timer = setInterval(() => k < last && root.isConnected ? draw(++k) : stop(), pace);
  };
  slider.oninput = function () { stop(); draw(+slider.value); };
  draw(last);
})();
