// New run: greys the prediction as soon as a field changes (the answer, which follows, shows a new one or the kept one);
// searches the settings; keeps what is open in parts that are replaced.
"use strict";
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
