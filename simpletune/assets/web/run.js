// The slider of a comparison shows one of its pictures.
"use strict";
document.addEventListener("input", (event) => {
  const slider = event.target.closest("input.frames");
  if (!slider) return;
  const figure = document.getElementById(slider.dataset.frames);
  const pictures = figure.querySelectorAll("img");
  pictures.forEach((picture, number) => { picture.hidden = number !== Number(slider.value); });
  const title = pictures[Number(slider.value)].dataset.title;
  slider.setAttribute("aria-valuetext", title);
  figure.querySelector("output").textContent = title;
});
