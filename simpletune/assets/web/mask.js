// Paints a mask over a picture. The canvas is opaque where the model learns. What was done is kept as a list, which undo and
// redo go along; both draw the mask that the page began with, and then the list up to where it stands.
"use strict";
const part = (name) => document.getElementById(`paint-${name}`);
const painter = document.getElementById("painter");
const canvas = document.getElementById("paint");
const context = canvas.getContext("2d");
const COLOUR = "#e6007a";
let base = null; // canvas of the mask so far
const done = []; // of {kind, points, size}
let at = 0; // how many of them count
let saved = null; // the last of them when the mask was saved
let stroke = null; // under way
let cursor = { x: canvas.width / 2, y: canvas.height / 2 };

function say(text, bad = false) {
  part("said").textContent = text;
  part("said").classList.toggle("problem", bad);
}

function segment({ kind, points, size }, index) {
  const from = points[Math.max(0, index - 1)], to = points[index];
  context.globalCompositeOperation = kind === "erase" ? "destination-out" : "source-over";
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = size;
  context.beginPath();
  context.moveTo(from.x, from.y);
  context.lineTo(to.x + (index ? 0 : 0.01), to.y); // some browsers draw no line of length 0
  context.stroke();
}

function draw(step) {
  const whole = [0, 0, canvas.width, canvas.height];
  context.fillStyle = context.strokeStyle = COLOUR;
  if (step.kind === "clear") {
    context.clearRect(...whole);
  } else if (step.kind === "fill" || step.kind === "invert") {
    context.globalCompositeOperation = step.kind === "fill" ? "source-over" : "xor";
    context.fillRect(...whole);
  } else {
    step.points.forEach((_, index) => segment(step, index));
  }
}

function redraw() {
  draw({ kind: "clear" });
  context.globalCompositeOperation = "source-over";
  if (base) context.drawImage(base, 0, 0);
  done.slice(0, at).forEach(draw);
  buttons();
}

function buttons() {
  part("undo").disabled = !at;
  part("redo").disabled = at === done.length;
}

function add(step) {
  done.length = at;
  done.push(step);
  at = done.length;
  draw(step);
  buttons();
  say("");
}

function go(by) {
  if (at + by < 0 || at + by > done.length || stroke) return;
  at += by;
  redraw();
  say(by < 0 ? "Undone" : "Redone");
}

const isSaved = () => (at ? done[at - 1] : null) === saved;
const size = () => Number(part("size").value);
const kind = () => (part("eraser").checked ? "erase" : "paint");

function ring() { // where the brush is, and how large
  const scale = canvas.clientWidth / canvas.width;
  const style = part("ring").style;
  part("ring").hidden = false;
  style.width = style.height = `${Math.max(4, size() * scale)}px`;
  style.left = `${cursor.x * scale}px`;
  style.top = `${cursor.y * scale}px`;
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  return { x: (event.clientX - box.left) * canvas.width / box.width, y: (event.clientY - box.top) * canvas.height / box.height };
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !event.isPrimary) return;
  canvas.setPointerCapture(event.pointerId);
  stroke = { kind: kind(), points: [cursor = place(event)], size: size() };
  add(stroke);
  ring();
});
canvas.addEventListener("pointermove", (event) => {
  if (!event.isPrimary) return;
  cursor = place(event);
  ring();
  if (!stroke) return;
  const all = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
  for (const each of all.length ? all : [event]) segment(stroke, stroke.points.push(place(each)) - 1);
});
for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => { if (event.isPrimary) stroke = null; });
canvas.addEventListener("pointerleave", () => { if (!stroke) part("ring").hidden = true; });
canvas.addEventListener("focus", ring);
canvas.addEventListener("blur", () => { part("ring").hidden = true; });

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function move(event) {
  const [right, down] = MOVES[event.key], before = cursor, by = Math.max(1, size() / 3);
  const within = (value, most) => Math.min(most, Math.max(0, value));
  cursor = { x: within(cursor.x + right * by, canvas.width), y: within(cursor.y + down * by, canvas.height) };
  if (event.shiftKey) add({ kind: kind(), points: [before, cursor], size: size() });
  ring();
}

function resize(factor) {
  const now = size(), after = Math.round(now * factor);
  part("size").value = after === now ? now + Math.sign(factor - 1) : after;
  say(`Size ${size()}`);
  ring();
}

const KEYS = {
  "[": () => resize(0.8), "]": () => resize(1.25), " ": () => { add({ kind: kind(), points: [cursor], size: size() }); ring(); },
  b: () => { part("brush").checked = true; say("Brush"); }, e: () => { part("eraser").checked = true; say("Eraser"); },
  i: () => part("invert").click(),
};
painter.addEventListener("keydown", (event) => {
  const command = (event.ctrlKey || event.metaKey) && !event.getModifierState("AltGraph");
  const key = event.key.toLowerCase();
  let action = null;
  if (command) action = { z: () => go(event.shiftKey ? 1 : -1), y: () => go(1), s: save }[key];
  else if (event.target === canvas) action = event.key in MOVES ? () => move(event) : KEYS[key];
  if (!action) return;
  event.preventDefault();
  action();
});
part("undo").addEventListener("click", () => go(-1));
part("redo").addEventListener("click", () => go(1));
for (const name of ["invert", "fill", "clear"]) {
  part(name).addEventListener("click", () => { add({ kind: name }); say({ invert: "Inverted", fill: "All of it", clear: "Nothing" }[name]); });
}
part("overlay").addEventListener("input", overlay);
function overlay() { canvas.style.opacity = part("overlay").value / 100; }

function blank() {
  const made = document.createElement("canvas");
  [made.width, made.height] = [canvas.width, canvas.height];
  return made;
}

function png() { // white on black
  const white = blank(), whole = blank(), ink = white.getContext("2d"), paper = whole.getContext("2d");
  ink.drawImage(canvas, 0, 0);
  ink.globalCompositeOperation = "source-in";
  ink.fillStyle = "white";
  ink.fillRect(0, 0, white.width, white.height);
  paper.fillRect(0, 0, whole.width, whole.height);
  paper.drawImage(white, 0, 0);
  return new Promise((made) => whole.toBlob(made, "image/png"));
}

async function save() {
  if (part("save").disabled) return false;
  part("save").disabled = true;
  const last = at ? done[at - 1] : null;
  try {
    const headers = { "content-type": "image/png", accept: "application/json" };
    const address = `${painter.dataset.save}&digest=${painter.dataset.digest}`;
    const answer = await fetch(address, { method: "POST", headers, body: await png() });
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.problem);
    painter.dataset.digest = told.digest;
    saved = last;
    say(`Saved as ${told.file}`);
    document.body.dispatchEvent(new Event("captions-changed")); // there is more to undo
    return true;
  } catch (error) {
    say(error instanceof TypeError ? "The server cannot be reached, so nothing was saved. Try again." : error.message, true);
    return false;
  } finally {
    part("save").disabled = false;
  }
}
part("save").addEventListener("click", save);
if (part("next")) part("next").addEventListener("click", async () => { if (await save()) location.assign(part("next").dataset.next); });
window.addEventListener("beforeunload", (event) => { if (!isSaved()) event.preventDefault(); });

async function begin() {
  for (const name of ["save", "next"]) if (part(name)) part(name).disabled = true; // until the mask so far is known
  canvas.parentElement.style.maxWidth = `${60 * canvas.width / canvas.height}vh`; // the whole picture fits the window
  overlay();
  if (painter.dataset.painted) await showPainted();
  for (const name of ["save", "next"]) if (part(name)) part(name).disabled = false;
}
async function showPainted() {
  const image = new Image();
  image.src = painter.dataset.painted;
  await image.decode();
  base = blank();
  const paper = base.getContext("2d", { willReadFrequently: true });
  paper.drawImage(image, 0, 0);
  const pixels = paper.getImageData(0, 0, base.width, base.height), [red, green, blue] = [1, 3, 5].map((start) => parseInt(COLOUR.slice(start, start + 2), 16));
  for (let index = 0; index < pixels.data.length; index += 4) pixels.data.set([red, green, blue, pixels.data[index]], index);
  paper.putImageData(pixels, 0, 0);
  redraw();
}
begin().catch(() => say("The mask so far cannot be shown. Reload the page before you paint.", true));
