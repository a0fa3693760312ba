// Greys the prediction as soon as a field of the form changes; the answer, which follows, shows a new one or the kept one.
"use strict";
document.addEventListener("input", (event) => {
  const live = document.getElementById("live");
  if (live && event.target.closest("#start")) live.classList.add("stale");
});
