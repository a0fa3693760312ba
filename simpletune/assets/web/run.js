// The sliders of a run's page: base against a step, the step of all pictures, and the strength of a comparison.
"use strict";
function showStep(number) {
  const slider = document.getElementById("matrix-step");
  const titles = [...document.querySelectorAll("#matrix thead th")].slice(1).map((each) => each.textContent);
  for (const frame of document.querySelectorAll("#frames .frame")) {
    const drawn = [...frame.querySelectorAll("img[data-at]")];
    const shown = drawn.filter((picture) => Number(picture.dataset.at) <= number).pop() || drawn[0];
    if (!shown) continue;
    const tag = frame.querySelector(".tag.right");
    if (tag) tag.textContent = titles[Number(shown.dataset.at)];
    if (shown.dataset.src) { shown.src = shown.dataset.src; delete shown.dataset.src; }
    for (const picture of drawn) picture.hidden = picture !== shown;
  }
  slider.setAttribute("aria-valuetext", titles[number]);
  document.getElementById("matrix-shown").textContent = titles[number];
}
document.addEventListener("input", (event) => {
  const slider = event.target;
  if (slider.id === "matrix-step") showStep(Number(slider.value));
  else if (slider.closest(".frame")) slider.closest(".frame").style.setProperty("--cut", slider.value + "%");
  else if (slider.matches("input.frames")) {
    const figure = document.getElementById(slider.dataset.frames);
    const pictures = figure.querySelectorAll("img");
    pictures.forEach((picture, number) => { picture.hidden = number !== Number(slider.value); });
    const title = pictures[Number(slider.value)].dataset.title;
    slider.setAttribute("aria-valuetext", title);
    figure.querySelector("output").textContent = title;
  }
});
