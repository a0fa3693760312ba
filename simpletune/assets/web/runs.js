// The page of all runs asks in a dialog before it deletes.
"use strict";
const question = document.getElementById("ask");
document.addEventListener("htmx:afterSwap", (event) => { if (event.detail.target === question) question.showModal(); });
document.addEventListener("htmx:afterRequest", (event) => { if (question.contains(event.detail.elt)) question.close(); });
