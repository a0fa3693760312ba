// A run's page: the sliders, the pictures on the whole screen, elapsed seconds, and the card's figures.
"use strict";
const cuts = new CSSStyleSheet(); // where lines of pairs are: the pages' policy forbids inline styles
document.adoptedStyleSheets.push(cuts);
const shares = new Map(); // of the base, in percent, by the id of the pair
let chosen = null; // title of the step that the slider shows; null: the last one, also when a new one comes

function showStep(number) {
  const slider = document.getElementById("matrix-step");
  for (const frame of document.querySelectorAll("#frames .frame")) {
    const drawn = [...frame.querySelectorAll("img[data-at]")];
    const shown = drawn.filter((picture) => Number(picture.dataset.at) <= number).pop() || drawn[0];
    if (!shown) continue;
    const tag = frame.querySelector(".tag.right");
    if (tag) tag.textContent = shown.dataset.title;
    if (shown.dataset.src) { shown.src = shown.dataset.src; delete shown.dataset.src; }
    for (const picture of drawn) picture.hidden = picture !== shown;
  }
  const title = titleAt(number);
  slider.setAttribute("aria-valuetext", title);
  document.getElementById("matrix-shown").textContent = title;
}
const titleAt = (number) => document.querySelector(`#frames img[data-at="${number}"]`)?.dataset.title || "";
function showShares() {
  cuts.replaceSync([...shares].map(([id, share]) => `#${id} { --cut: ${share}%; }`).join(" "));
}
function restore() { // after new pictures: the lines and the step stay
  for (const [id, share] of shares) {
    const input = document.querySelector(`#${id} input`);
    if (input) input.value = share;
  }
  const slider = document.getElementById("matrix-step");
  const picture = chosen && [...document.querySelectorAll("#frames img[data-at]")].find((each) => each.dataset.title === chosen);
  if (slider && picture) { slider.value = picture.dataset.at; showStep(Number(slider.value)); }
}
document.addEventListener("input", (event) => {
  const slider = event.target, frame = slider.closest(".frame");
  if (slider.id === "matrix-step") {
    chosen = slider.value === slider.max ? null : titleAt(Number(slider.value));
    showStep(Number(slider.value));
  } else if (frame) {
    shares.set(frame.id, Number(slider.value));
    showShares();
  } else if (slider.matches("input.frames")) {
    const figure = document.getElementById(slider.dataset.frames);
    const pictures = figure.querySelectorAll("img");
    pictures.forEach((picture, number) => { picture.hidden = number !== Number(slider.value); });
    const title = pictures[Number(slider.value)].dataset.title;
    slider.setAttribute("aria-valuetext", title);
    figure.querySelector("output").textContent = title;
  }
});

// The viewer reads what it shows from the timeline, which may be replaced meanwhile.
const viewer = document.getElementById("viewer"), stage = document.getElementById("viewer-stage");
const toggle = document.getElementById("viewer-base");
let row = "1", title = "", base = false, touched = null;
const shots = (of) => [...document.querySelectorAll(`.shot[data-row="${of}"]`)];
const shotOf = (of, named) => shots(of).find((each) => each.dataset.title === named) || shots(of).pop();
function draw() {
  const shot = shotOf(row, base ? "base" : title);
  if (!shot) return;
  const shown = shot.dataset.title;
  document.getElementById("viewer-prompt").textContent = document.getElementById(`prompt-${row}`).textContent;
  document.getElementById("viewer-step").textContent = base && shown !== title ? `${shown} (of ${title})` : shown;
  toggle.setAttribute("aria-pressed", String(base));
  toggle.hidden = !shots(row).some((each) => each.dataset.title === "base");
  if (stage.firstChild?.getAttribute("src") === shot.getAttribute("href")) return;
  const picture = new Image();
  picture.alt = shot.querySelector("img").alt;
  picture.src = shot.getAttribute("href");
  stage.replaceChildren(picture);
}
function move(key) {
  const steps = shots(row), at = steps.indexOf(shotOf(row, title));
  if (key === "ArrowLeft" || key === "ArrowRight") {
    base = false;
    title = steps[Math.min(steps.length - 1, Math.max(0, at + (key === "ArrowLeft" ? -1 : 1)))].dataset.title;
  } else if (key === " ") base = !base;
  else {
    const next = String(Number(row) + (key === "ArrowUp" ? -1 : 1));
    if (shots(next).length) row = next;
  }
  draw();
}
document.addEventListener("click", (event) => {
  const shot = event.target.closest(".shot"), button = event.target.closest("#viewer [data-key]");
  if (shot && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    ({ row, title } = shot.dataset);
    base = false;
    draw();
    viewer.showModal();
  } else if (button) move(button.dataset.key);
  else if (event.target.id === "viewer-close") viewer.close();
});
viewer.addEventListener("keydown", (event) => {
  const arrow = event.key.startsWith("Arrow");
  if (arrow || (event.key === " " && !event.repeat && event.target.tagName !== "BUTTON")) { event.preventDefault(); move(event.key); }
});
stage.addEventListener("pointerdown", (event) => { touched = [event.clientX, event.clientY]; });
stage.addEventListener("pointerup", (event) => { // a swipe moves, a tap shows the base
  if (!touched) return;
  const x = event.clientX - touched[0], y = event.clientY - touched[1];
  touched = null;
  if (Math.max(Math.abs(x), Math.abs(y)) < 30) move(" ");
  else if (Math.abs(x) > Math.abs(y)) move(x > 0 ? "ArrowLeft" : "ArrowRight");
  else move(y > 0 ? "ArrowUp" : "ArrowDown");
});
viewer.addEventListener("close", () => shotOf(row, title)?.focus());

document.addEventListener("htmx:afterSwap", (event) => {
  const place = event.detail.target;
  if (place.id === "run-pictures") { restore(); if (viewer.open) draw(); }
  const ready = place.querySelector("[data-fetch]");
  if (ready) { ready.removeAttribute("data-fetch"); ready.click(); }
});
let seconds = 0;
setInterval(() => {
  seconds += 1;
  for (const each of document.querySelectorAll("[data-elapsed]")) {
    each.dataset.elapsed = Number(each.dataset.elapsed) + 1;
    each.textContent = `${each.dataset.elapsed} s`;
  }
  if (seconds % 3 === 0 && !document.hidden && document.querySelector("[data-live]")) htmx.trigger("#run-card", "changed");
}, 1000);
