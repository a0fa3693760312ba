"use strict";
(() => {
  const root = document.documentElement;
  const find = (id) => document.getElementById(id);
  const read = (id) => JSON.parse(find(id).textContent);
  const charts = read("charts"), losses = read("losses");
  const views = new Map();
  const POINTS = 1200; // maximum per curve
  const wide = window.matchMedia("(min-width: 40rem)");

  // Follow the system's light or dark theme until the button is pressed.
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const colour = (name) => { // the style has light-dark(#..., #...)
    const [light, dark] = getComputedStyle(root).getPropertyValue("--" + name).match(/#\w+/g);
    return root.dataset.theme === "dark" ? dark : light;
  };
  const paint = () => { root.dataset.theme = chosen || (dark.matches ? "dark" : "light"); };
  paint();
  dark.addEventListener("change", () => { paint(); drawAll(); });
  find("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    paint();
    drawAll();
  });

  const coloured = (value) => {
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, key === "values" ? inner : coloured(inner)]));
    if (value === "@runs") return [0, 1, 2, 3, 5, 4, 7, 8, 6].map((n) => colour("part" + n));
    return typeof value === "string" && value.startsWith("@") ? colour(value.slice(1)) : value;
  };

  const look = (width) => {
    const font = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif";
    const text = { labelColor: colour("muted"), titleColor: colour("muted"), labelFont: font, titleFont: font, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
    return {
      background: "transparent", font, view: { stroke: null },
      axis: { ...text, gridColor: colour("line"), domainColor: colour("line"), tickColor: colour("line"), labelLimit: wide.matches ? 220 : 110, labelOverlap: "greedy", labelSeparation: 6 },
      axisY: { labelColor: colour("ink") },
      legend: { ...text, labelColor: colour("ink"), columns: Math.max(2, Math.floor(width / 105)), symbolType: "square", labelLimit: 200 },
      text: { font, fontSize: 12 },
      autosize: { type: "fit-x", contains: "padding" },
    };
  };

  // Smooth the loss by a bias-corrected exponential mean; thin long curves but keep the extremes of each part.
  const smoothed = (values, weight) => {
    let mean = 0, part = 1;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      part *= weight;
      return mean / (1 - part);
    });
  };
  const kept = (values) => {
    if (values.length <= POINTS) return values.map((_, index) => index);
    const size = Math.ceil((2 * values.length) / POINTS), found = new Set([0, values.length - 1]);
    for (let from = 0; from < values.length; from += size) {
      let low = from, high = from;
      for (let at = from; at < Math.min(from + size, values.length); at++) {
        if (values[at] < values[low]) low = at;
        if (values[at] > values[high]) high = at;
      }
      found.add(low).add(high);
    }
    return [...found].sort((a, b) => a - b);
  };
  const lossRows = () => {
    const weight = find("smoothing") ? Number(find("smoothing").value) : 0.9;
    return losses.flatMap((run) => {
      const smooth = smoothed(run.loss, weight);
      const fields = Object.keys(run).filter((key) => Array.isArray(run[key]));
      return kept(run.loss).map((index) => ({
        run: run.run, smoothed: smooth[index], ...Object.fromEntries(fields.map((field) => [field, run[field][index]])),
      }));
    });
  };

  const draw = async (holder) => {
    const name = holder.dataset.chart;
    const spec = { width: "container", ...coloured(charts[name]) };
    if (spec.data && spec.data.name === "loss") spec.data = { name: "loss", values: lossRows() };
    if (views.has(name)) views.get(name).finalize();
    const made = await window.vegaEmbed(holder, spec, { actions: false, renderer: "svg", ast: true, config: look(holder.clientWidth), tooltip: { theme: "page" } });
    views.set(name, made);
  };
  let drawing = Promise.resolve();
  const drawAll = () => {
    const holders = [...document.querySelectorAll(".chart")];
    drawing = drawing.then(async () => { for (const holder of holders) await draw(holder); });
    return drawing.then(() => { root.dataset.drawn = "yes"; });
  };
  drawAll();
  wide.addEventListener("change", drawAll);

  const smoothing = find("smoothing");
  if (smoothing) smoothing.addEventListener("input", () => {
    find("smoothing-value").textContent = Number(smoothing.value).toFixed(2);
    const made = views.get("loss");
    if (made) made.view.data("loss", lossRows()).run();
  });

  // Connect the sliders of the pictures: base against tuned, and the step.
  for (const frame of document.querySelectorAll(".frame")) {
    const slider = frame.querySelector("input");
    if (slider) slider.addEventListener("input", () => frame.style.setProperty("--cut", slider.value + "%"));
  }
  const sharpen = (image) => { if (image.naturalWidth && image.naturalWidth <= 128) image.classList.add("tiny"); };
  for (const image of document.images) {
    if (image.complete) sharpen(image);
    else image.addEventListener("load", () => sharpen(image));
  }
  const step = find("step");
  if (step) step.addEventListener("input", () => {
    const states = step.dataset.steps.split(","), now = Number(step.value);
    find("step-value").textContent = states[now];
    for (const frame of document.querySelectorAll(".frame")) {
      const drawn = [...frame.querySelectorAll("img[data-step]")];
      const shown = drawn.filter((image) => states.indexOf(image.dataset.step) <= now).pop() || drawn[0];
      for (const image of drawn) image.hidden = image !== shown;
      const label = frame.querySelector(".of-step");
      if (shown && label) label.textContent = (shown.dataset.step === "start" ? "" : "step ") + shown.dataset.step;
    }
  });

  const strength = find("strength");
  if (strength) strength.addEventListener("input", () => {
    const chosen = strength.dataset.strengths.split(",")[Number(strength.value)];
    find("strength-value").textContent = chosen;
    for (const image of document.querySelectorAll("img[data-strength]")) image.hidden = image.dataset.strength !== chosen;
  });

  // Compute the run's cost at the given price.
  const price = find("price");
  const cost = () => {
    const dollars = Number(price.value);
    for (const output of document.querySelectorAll("output[data-seconds]")) {
      const value = (Number(output.dataset.seconds) / 3600) * dollars;
      output.textContent = dollars > 0 ? "$" + (value >= 1 ? value.toFixed(2) : Number(value.toPrecision(2))) : "–";
    }
  };
  if (price) { price.addEventListener("input", cost); cost(); }
})();
