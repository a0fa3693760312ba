// New run: greys the prediction as soon as a field changes (the answer, which follows, shows a new one or the kept one);
// sends the buttons that choose a model or answer a question; searches the settings; keeps what is open in parts that
// are replaced.
"use strict";
const form = document.getElementById("start");
const pressed = []; // each stays until a request with it has been answered: a change that follows aborts the one before
form.addEventListener("click", (event) => {
  const button = event.target.closest("button[name]");
  if (!button) return;
  event.preventDefault();
  pressed.push(button);
  if (pressed.length === 1) htmx.trigger(form, "pressed");
});
document.addEventListener("htmx:configRequest", ({ detail }) => {
  if (detail.verb !== "post" || !form.contains(detail.elt)) return;
  // htmx sends a form's button that has the focus as if it had been pressed, to where that button leads
  for (const button of form.querySelectorAll("button[name]")) delete detail.parameters[button.name];
  detail.path = "/start/change";
  detail.pressed = pressed[0];
  if (pressed.length) detail.parameters[pressed[0].name] = pressed[0].value;
});
document.addEventListener("htmx:afterOnLoad", ({ detail }) => {
  if (!pressed.length || detail.requestConfig.pressed !== pressed[0]) return;
  pressed.shift();
  if (pressed.length) htmx.trigger(form, "pressed");
});
document.addEventListener("input", (event) => {
  const live = document.getElementById("live");
  if (live && event.target.closest("#start") && event.target.id !== "i-search") live.classList.add("stale");
});

const search = document.getElementById("i-search");
search.closest(".search").hidden = false;
for (const name of ["input", "change"]) search.addEventListener(name, (event) => event.stopPropagation()); // changes no field
const words = (element) => `${element.querySelector("[name]")?.name || ""} ${element.textContent}`.toLowerCase().replaceAll("_", " ");

function find() { // shows the fields that have all words, and opens their sections
  const wanted = search.value.toLowerCase().replaceAll("_", " ").split(/\s+/).filter(Boolean);
  let found = 0;
  for (const section of document.querySelectorAll("#everything > details")) {
    let inside = 0;
    for (const field of section.querySelectorAll(".field")) {
      const own = words(field);
      field.hidden = !wanted.every((word) => own.includes(word));
      inside += !field.hidden;
    }
    for (const group of section.querySelectorAll("fieldset.inner")) group.hidden = !group.querySelector(".field:not([hidden])");
    section.hidden = wanted.length > 0 && !inside;
    if (wanted.length) section.open = inside > 0;
    found += inside;
  }
  document.getElementById("f-base").hidden = wanted.length > 0;
  document.getElementById("found").textContent = wanted.length ? `${found} setting${found === 1 ? "" : "s"}` : "";
}
for (const name of ["input", "change"]) search.addEventListener(name, find);

const KEPT = ["captions", "another"]; // their parts are replaced after every change
const open = new Set();
document.addEventListener("toggle", (event) => {
  if (KEPT.includes(event.target.id)) open[event.target.open ? "add" : "delete"](event.target.id);
}, true);
document.body.addEventListener("htmx:oobAfterSwap", () => {
  for (const id of open) {
    const part = document.getElementById(id);
    if (part) part.open = true;
  }
});
document.body.addEventListener("htmx:afterSettle", () => { if (search.value) find(); });

document.addEventListener("click", (event) => { // the token's form
  const opener = event.target.closest("[data-dialog]");
  if (opener) document.getElementById(opener.dataset.dialog).showModal();
});
document.getElementById("account").addEventListener("close", () => { document.getElementById("i-token").value = ""; });
