// Shows a chart's values at the step under the pointer, or by the arrow keys.
"use strict";
(() => {
  const SPACE = "http://www.w3.org/2000/svg";
  const points = (line) => line.dataset.values.split(" ").map((each) => each.split(":").map(Number)); // step, value
  const nearest = (found, step) => found.reduce((best, each) => (Math.abs(each[0] - step) < Math.abs(best[0] - step) ? each : best));
  function show(svg, step) {
    const lines = [...svg.querySelectorAll("polyline[data-values]")].map((line) => [line.dataset.name, points(line)]);
    const at = nearest(lines[0][1], step)[0];
    svg.dataset.step = at;
    const { left, right, last } = svg.dataset;
    const x = Number(left) + (at / Number(last)) * (Number(right) - Number(left));
    let mark = svg.querySelector(".under");
    if (!mark) { mark = svg.appendChild(document.createElementNS(SPACE, "line")); mark.setAttribute("class", "under"); }
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", 10], ["y2", svg.viewBox.baseVal.height - 30]]) mark.setAttribute(name, value);
    const words = lines.map(([name, found]) => `${name} ${Number(nearest(found, at)[1].toPrecision(4))}`.trim());
    svg.closest("figure").querySelector("output").textContent = `step ${at.toLocaleString("en")}: ${words.join(", ")}`;
  }
  function clear(svg) {
    svg.querySelector(".under")?.remove();
    svg.closest("figure").querySelector("output").textContent = "";
    delete svg.dataset.step;
  }
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest?.("figure.chart svg");
    if (!svg) return;
    const box = svg.getBoundingClientRect(), { left, right, last } = svg.dataset;
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const share = (x - Number(left)) / (Number(right) - Number(left));
    show(svg, Math.min(1, Math.max(0, share)) * Number(last));
  });
  document.addEventListener("pointerout", (event) => {
    const svg = event.target.closest?.("figure.chart svg");
    if (svg && !svg.contains(event.relatedTarget)) clear(svg);
  });
  document.addEventListener("keydown", (event) => {
    const svg = event.target.closest?.("figure.chart svg");
    if (!svg || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const steps = points(svg.querySelector("polyline[data-values]")).map(([step]) => step);
    const now = svg.dataset.step === undefined ? steps.length : steps.indexOf(Number(svg.dataset.step));
    const next = now + (event.key === "ArrowLeft" ? -1 : 1);
    show(svg, steps[Math.min(steps.length - 1, Math.max(0, next))]);
  });
  document.addEventListener("focusout", (event) => { if (event.target.matches?.("figure.chart svg")) clear(event.target); });
})();
