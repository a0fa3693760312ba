"use strict";

const at = (id) => document.getElementById(id);
const NUMBERS = ["scale", "steps", "guidance", "width", "height", "seed"];
const LABELS = { prompt: "Prompt", negative_prompt: "Negative prompt", num_inference_steps: "Steps",
  guidance_scale: "Guidance", lora: "LoRA", lora_scale: "Strength", width: "Width", height: "Height", seed: "Seed",
  image: "Picture", mask_image: "Mask", strength: "Share of the steps" };
const given = new URLSearchParams(location.search);
let abort = null;
let standard = {}; // the server's defaults
let tuned = null; // the name of the run's full model, if any; a full model has no strength
let loaded = null; // the picture to paint into, as it was chosen
let last = null; // where the brush was

// Fill the form from the server's defaults, then from the address: /?prompt=a+red+star&seed=3&run=1
function fill(info) {
  const limits = info.limits;
  standard = info.standard;
  tuned = info.tuned;
  if (tuned !== null) at("kind").textContent = "Model";
  for (const name of info.loras) at("lora").append(new Option(optionText(name), name));
  if (info.loras.length > 1) at("lora").value = info.loras[1];
  at("negative").value = standard.negative_prompt;
  for (const name of ["steps", "guidance", "width", "height", "seed"]) at(name).value = standard[name];
  at("steps").max = limits.steps;
  for (const name of ["width", "height"]) {
    at(name).max = limits.side;
    at(name).min = at(name).step = limits.multiple;
  }
  at("prompt").maxLength = at("negative").maxLength = limits.prompt;
  for (const name of ["prompt", "negative", "lora", ...NUMBERS]) if (given.has(name)) at(name).value = given.get(name);
  at("painting").open = info.inpaints;
  if (given.get("view") === "slider") document.querySelector("[name=view][value=slider]").checked = true;
  if (given.has("cut")) at("cut").value = given.get("cut");
  choose();
}

function optionText(name) {
  if (name !== "base") return name;
  return tuned === null ? "none (base only)" : "base only";
}

// Update the form for the chosen model: only a LoRA has a strength.
function choose() {
  const name = at("lora").value;
  at("scale").disabled = name === "base" || name === tuned;
  at("right").textContent = name === "base" || tuned === null ? "LoRA" : name;
}

function served(info) {
  const loras = info.loras.length - 1 - (tuned === null ? 0 : 1);
  const words = `${loras} LoRA${loras === 1 ? "" : "s"}`;
  if (tuned === null) return `${words} and the base`;
  return `${tuned} (full model)${loras ? `, ${words}` : ""} and the base`;
}

function show(element, visible) { element.hidden = !visible; }

function explain(message, problems = []) {
  const box = at("error");
  box.replaceChildren(problems.length ? "Not drawn:" : message);
  if (problems.length) {
    const list = document.createElement("ul");
    for (const each of problems) {
      const item = document.createElement("li");
      const name = each.path.split(".").pop();
      item.textContent = name ? `${LABELS[name] ?? each.path}: ${each.message}` : each.message;
      list.append(item);
    }
    box.append(list);
  }
  show(box, true);
}

// Request both pictures at once, the base first: one seed gives both the same noise.
function body() {
  const value = (name) => (at(name).value === "" ? null : Number(at(name).value));
  const prompt = at("prompt").value, lora = at("lora").value;
  const instances = [{ prompt, lora: "base" }];
  if (lora !== "base") instances.push(lora === tuned ? { prompt, lora } : { prompt, lora, lora_scale: value("scale") });
  return { instances, parameters: {
    // an empty field is no negative prompt, as by default, and the empty text only in place of another default
    negative_prompt: at("negative").value || (standard.negative_prompt ? "" : null),
    num_inference_steps: value("steps"), guidance_scale: value("guidance"),
    width: value("width"), height: value("height"), seed: value("seed"), ...painted(value("strength")) } };
}

// The picture to paint into, and its mask if anything of it is painted, in base64.
function painted(strength) {
  if (loaded === null) return {};
  const [base64, hole] = [(canvas) => canvas.toDataURL("image/png").split(",")[1], at("hole")];
  const pixels = hole.getContext("2d").getImageData(0, 0, hole.width, hole.height).data;
  if (!pixels.some((value, index) => index % 4 === 3 && value)) return { image: base64(at("seen")), strength };
  const mask = document.createElement("canvas");
  [mask.width, mask.height] = [hole.width, hole.height];
  const paper = mask.getContext("2d");
  paper.fillRect(0, 0, mask.width, mask.height);
  const white = paper.getImageData(0, 0, mask.width, mask.height);
  for (let index = 0; index < pixels.length; index += 4) white.data.fill(pixels[index + 3], index, index + 3);
  paper.putImageData(white, 0, 0);
  return { image: base64(at("seen")), mask_image: base64(mask), strength };
}

// Draw the picture at the size to draw, cropped in the middle as the server does; what was painted is gone.
function fit() {
  show(at("painter"), loaded !== null);
  if (loaded === null || !(at("width").value > 0 && at("height").value > 0)) return;
  for (const id of ["seen", "hole"]) [at(id).width, at(id).height] = [at("width").value, at("height").value];
  cover(at("seen"), loaded);
  if (at("mask").files.length) loadMask();
}

function cover(canvas, image) {
  const scale = Math.max(canvas.width / image.width, canvas.height / image.height);
  const [width, height] = [image.width * scale, image.height * scale];
  canvas.getContext("2d").drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
}

async function read(input) {
  const [file] = input.files;
  if (!file) return null;
  try {
    return await createImageBitmap(file);
  } catch {
    explain(`${file.name} is not a picture that can be read`);
    input.value = "";
    return null;
  }
}

async function load() {
  loaded = await read(at("image"));
  fit();
}

async function loadMask() {
  const image = await read(at("mask")), hole = at("hole"), paper = hole.getContext("2d");
  if (image === null) return;
  if (loaded !== null && Math.abs(image.width * loaded.height / (image.height * loaded.width) - 1) > 0.02) {
    at("mask").value = "";
    return explain("The mask has another shape than the picture");
  }
  paper.globalCompositeOperation = "source-over";
  paper.clearRect(0, 0, hole.width, hole.height);
  cover(hole, image);
  const pixels = paper.getImageData(0, 0, hole.width, hole.height);
  for (let index = 0; index < pixels.data.length; index += 4) {
    const inside = pixels.data[index] + pixels.data[index + 1] + pixels.data[index + 2] >= 384;
    pixels.data.set([230, 0, 122, inside ? 255 : 0], index);
  }
  paper.putImageData(pixels, 0, 0);
}

function stroke(event) {
  const hole = at("hole"), box = hole.getBoundingClientRect(), paper = hole.getContext("2d");
  const to = { x: (event.clientX - box.left) * hole.width / box.width, y: (event.clientY - box.top) * hole.height / box.height };
  paper.globalCompositeOperation = at("eraser").checked ? "destination-out" : "source-over";
  paper.strokeStyle = "#e6007a";
  paper.lineCap = paper.lineJoin = "round";
  paper.lineWidth = at("brush").value / 100 * Math.min(hole.width, hole.height);
  paper.beginPath();
  paper.moveTo((last ?? to).x, (last ?? to).y);
  paper.lineTo(to.x + 0.01, to.y); // some browsers draw no line of length 0
  paper.stroke();
  last = to;
}

function fillAll(yes) {
  const hole = at("hole"), paper = hole.getContext("2d");
  paper.globalCompositeOperation = "source-over";
  paper.clearRect(0, 0, hole.width, hole.height);
  paper.fillStyle = "#e6007a";
  if (yes) paper.fillRect(0, 0, hole.width, hole.height);
}

function picture(figure, base64, caption, prompt) {
  const image = figure.querySelector("img");
  image.onload = () => image.classList.toggle("small", image.naturalWidth <= 128);
  image.src = "data:image/png;base64," + base64;
  image.alt = `${caption}: ${prompt}`;
  figure.querySelector("figcaption").textContent = caption;
}

function arrange() {
  const two = at("pictures").dataset.count === "2";
  const slider = two && document.querySelector("[name=view]:checked").value === "slider";
  at("pictures").className = two ? (slider ? "slider" : "beside") : "beside single";
  at("pictures").style.setProperty("--cut", at("cut").value + "%");
  show(at("cutter"), slider);
}

async function draw(event) {
  event?.preventDefault();
  if (abort) return;
  const asked = body(), clock = performance.now(), given = asked.parameters;
  if (given.image && !given.mask_image && given.strength === 1)
    return explain("Nothing is painted over. Paint what to draw anew, press All, or take a share of the steps below 1");
  abort = new AbortController();
  const ticker = setInterval(() => {
    at("progress").textContent = `drawing, ${((performance.now() - clock) / 1000).toFixed(0)} s`;
  }, 1000);
  at("progress").textContent = "drawing";
  busy(true);
  try {
    const answer = await fetch("predict", { method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(asked), signal: abort.signal });
    const result = await answer.json();
    if (answer.ok) present(result.predictions, asked, answer.headers.get("server-timing"));
    else explain(result.error.message, result.error.problems);
  } catch (error) {
    if (error.name !== "AbortError") explain(`The server did not respond: ${error.message}`);
  }
  clearInterval(ticker);
  at("progress").textContent = "";
  abort = null;
  busy(false);
}

function busy(yes) {
  if (yes) show(at("error"), false);
  at("draw").disabled = yes;
  show(at("cancel"), yes);
  at("result").setAttribute("aria-busy", String(yes));
}

function present(predictions, asked, timing) {
  const base64 = predictions.map((each) => each.output ?? each), other = asked.instances[1];
  picture(at("before"), base64[0], "base", asked.instances[0].prompt);
  const strength = other && other.lora !== tuned ? ` × ${other.lora_scale ?? 1}` : "";
  if (other) picture(at("after"), base64[1], other.lora + strength, other.prompt);
  at("pictures").dataset.count = base64.length;
  for (const id of ["pictures", "about"]) show(at(id), true);
  show(at("empty"), false);
  show(at("views"), Boolean(other));
  arrange();
  const p = asked.parameters;
  at("about").textContent = `seed ${p.seed}, ${p.num_inference_steps} step${p.num_inference_steps === 1 ? "" : "s"}, guidance ${p.guidance_scale}, ` +
    `${p.width} × ${p.height}, drawn in ${seconds("draw", timing)} s, waited ${seconds("wait", timing)} s`;
}

function seconds(name, timing) {
  return (Number(new RegExp(`${name};dur=(\\d+)`).exec(timing)?.[1]) / 1000).toFixed(1);
}

async function connect() {
  try {
    const info = await (await fetch("info")).json();
    if (!at("lora").options.length) fill(info);
    at("state").textContent = info.status === "ready" ? served(info) : `the model is ${info.status}`;
    if (info.status !== "ready") return void setTimeout(connect, 1000);
    if (given.get("run") === "1") { given.delete("run"); await draw(); }
  } catch (error) {
    at("state").textContent = "the server does not respond";
    setTimeout(connect, 3000);
  }
}

at("form").addEventListener("submit", draw);
at("cancel").addEventListener("click", () => abort?.abort());
at("another").addEventListener("click", () => { at("seed").value = Math.floor(Math.random() * 2 ** 32); });
at("cut").addEventListener("input", arrange);
at("image").addEventListener("change", load);
at("mask").addEventListener("change", loadMask);
at("remove").addEventListener("click", () => { at("image").value = at("mask").value = ""; loaded = null; fit(); });
at("whole").addEventListener("click", () => fillAll(true));
at("clear").addEventListener("click", () => fillAll(false));
for (const name of ["width", "height"]) at(name).addEventListener("change", fit);
at("hole").addEventListener("pointerdown", (event) => { at("hole").setPointerCapture(event.pointerId); last = null; stroke(event); });
at("hole").addEventListener("pointermove", (event) => { if (event.buttons && last !== null) stroke(event); });
for (const name of ["pointerup", "pointercancel"]) at("hole").addEventListener(name, () => { last = null; });
at("lora").addEventListener("change", choose);
for (const radio of document.querySelectorAll("[name=view]")) radio.addEventListener("change", arrange);
connect();
