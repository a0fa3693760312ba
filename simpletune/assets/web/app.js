// Keeps pages up to date. Elements name what they show with data-topic, a topic a line; when the server says that a topic
// has changed, they get the event "changed", on which htmx reloads them (hx-trigger="changed").
//
// A browser opens at most six connections to a server, so its tabs share one event stream: the visible tab that holds a
// lock reads it and tells the others. A hidden tab gives the lock away. Where locks are missing (http from another
// machine), a visible tab polls every three seconds instead. A stream that has died in silence, as behind a proxy or a
// laptop's lid, is replaced when three heartbeats of the server are missing.
"use strict";
const shared = "BroadcastChannel" in window ? new BroadcastChannel("simpletune") : null;
const PERIOD = 3000; // ms between two polls
const SILENCE = 45000; // ms without an event until the stream counts as lost
let known = -1; // number of the last change that a poll has seen
let release = null; // ends this tab's turn at the stream
let poll = null;

function show(text) {
  const place = document.getElementById("connection");
  if (place && place.textContent !== text) place.textContent = text;
}

function refresh(topics) { // null: everything
  for (const element of document.querySelectorAll("[data-topic]")) {
    const own = element.dataset.topic.split("\n");
    if (topics === null || own.some((topic) => topics.includes(topic))) htmx.trigger(element, "changed");
  }
}

function told(message) {
  if (message.state) show(message.state);
  if (message.topics !== undefined) refresh(message.topics);
}

function tell(message) {
  told(message);
  if (shared) shared.postMessage(message);
}

function stream() { // a promise that ends with the turn
  return new Promise((done) => {
    let source, silence, lost = false;
    const lose = (state) => { lost = true; tell({ state }); };
    const alive = () => {
      clearTimeout(silence);
      silence = setTimeout(() => { lose("not connected; trying again"); open(); }, SILENCE);
    };
    const open = () => {
      if (source) source.close();
      source = new EventSource("/events");
      alive();
      source.addEventListener("hello", () => { alive(); tell({ state: "live", ...(lost ? { topics: null } : {}) }); lost = false; });
      source.addEventListener("beat", alive);
      source.addEventListener("changed", (event) => { alive(); tell({ topics: JSON.parse(event.data) }); });
      source.addEventListener("bye", () => lose("the page was stopped in the terminal"));
      source.addEventListener("error", () => lose("not connected; trying again"));
    };
    open();
    release = () => { clearTimeout(silence); source.close(); release = null; done(); };
  });
}

async function take() {
  if (document.hidden || release) return;
  await navigator.locks.request("simpletune-events", { signal: waiting.signal }, async () => {
    if (!document.hidden) await stream();
  }).catch((error) => { if (error.name !== "AbortError") throw error; });
}

async function ask() {
  try {
    const answer = await (await fetch(`/changes?since=${known}`)).json();
    if (known >= 0 && answer.topics.length) refresh(answer.topics);
    known = answer.number;
    show("polling every 3 s");
  } catch {
    show("not connected; trying again");
  }
}

let waiting = new AbortController();
function visibility() {
  if (navigator.locks && shared) {
    if (document.hidden) {
      waiting.abort();
      if (release) release();
    } else {
      waiting = new AbortController();
      if (wasHidden) refresh(null); // what changed meanwhile
      take();
    }
  } else {
    clearInterval(poll);
    if (!document.hidden) { ask(); poll = setInterval(ask, PERIOD); }
  }
  wasHidden = document.hidden;
}

let wasHidden = false;
if (shared) shared.addEventListener("message", (event) => told(event.data));
document.addEventListener("visibilitychange", visibility);
window.addEventListener("pagehide", () => { if (release) release(); });
visibility();

document.addEventListener("load", (event) => { // pictures of a few pixels stay sharp
  const picture = event.target;
  if (picture.tagName === "IMG") picture.classList.toggle("tiny", picture.naturalWidth <= 128);
}, true);
for (const picture of document.images) if (picture.complete && picture.naturalWidth && picture.naturalWidth <= 128) picture.classList.add("tiny");
document.addEventListener("input", (event) => { // Save appears once a caption is edited
  const save = event.target.closest(".data-card form")?.querySelector("button");
  if (save) save.hidden = false;
});
let opened = []; // folded parts that stay open when what is around them is renewed
document.addEventListener("htmx:beforeSwap", (event) => {
  opened = [...event.detail.target.querySelectorAll("details[data-stays][open]")].map((each) => each.id);
});
document.addEventListener("htmx:afterSwap", () => {
  for (const id of opened) { const part = document.getElementById(id); if (part) part.open = true; }
  opened = [];
});
