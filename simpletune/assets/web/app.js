// Keeps pages up to date. Elements name what they show with data-topic, a topic a line; when the server says that a topic
// has changed, they get the event "changed", on which htmx reloads them (hx-trigger="changed").
//
// A browser opens at most six connections to a server, so its tabs share one event stream: the visible tab that holds a
// lock reads it and tells the others. A hidden tab gives the lock away. Where locks are missing (http from another
// machine), or the stream fails, a visible tab polls every three seconds instead.
"use strict";
const shared = "BroadcastChannel" in window ? new BroadcastChannel("simpletune") : null;
const PERIOD = 3000; // ms between two polls
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
    const source = new EventSource("/events");
    let lost = false;
    source.addEventListener("hello", () => { tell({ state: "live", ...(lost ? { topics: null } : {}) }); lost = false; });
    source.addEventListener("changed", (event) => tell({ topics: JSON.parse(event.data) }));
    source.addEventListener("bye", () => { lost = true; tell({ state: "the page was stopped in the terminal" }); });
    source.addEventListener("error", () => { lost = true; tell({ state: "not connected; trying again" }); });
    release = () => { source.close(); release = null; done(); };
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
  if (picture.tagName === "IMG" && picture.naturalWidth <= 128) picture.classList.add("tiny");
}, true);
for (const picture of document.images) if (picture.complete && picture.naturalWidth && picture.naturalWidth <= 128) picture.classList.add("tiny");
document.addEventListener("input", (event) => { // Save appears once a caption is edited
  const save = event.target.closest(".data-card form")?.querySelector("button");
  if (save) save.hidden = false;
});
