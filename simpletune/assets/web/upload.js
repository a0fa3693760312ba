// Sends dropped or chosen pictures, captions and zip files to a new folder, one after the other, and puts the folder into the
// form as if it was typed. Closing the page ends the upload, and the server then keeps nothing of it.
"use strict";
const part = (name) => document.getElementById(`upload-${name}`);
const LISTED = 200; // left out files that are shown
let upload = null; // id, and the request that is under way

function say(text, leftOut = []) {
  part("said").textContent = text;
  const more = leftOut.length - LISTED;
  const lines = more > 0 ? [...leftOut.slice(0, LISTED), `and ${more} more`] : leftOut;
  part("left").replaceChildren(...lines.map((line) => {
    const item = document.createElement("li");
    item.textContent = line;
    return item;
  }));
}

function post(address, body, progress) {
  return new Promise((done, fail) => {
    const request = new XMLHttpRequest();
    const lost = () => fail(new Error("The connection was lost, or a file changed meanwhile: nothing of this upload was kept. Upload again."));
    request.open("POST", address);
    request.setRequestHeader("accept", "application/json");
    request.responseType = "json";
    request.upload.addEventListener("progress", (event) => progress && progress(event.loaded));
    request.addEventListener("load", () => {
      if (request.status < 400) done(request.response);
      else fail(new Error((request.response && request.response.problem) || `The server answered ${request.status}. Upload again.`));
    });
    request.addEventListener("error", lost);
    request.addEventListener("abort", () => fail(new Error("Cancelled: nothing of this upload was kept.")));
    if (upload) upload.request = request;
    request.send(body);
  });
}

async function walk(entry, above, found) { // the files of a dropped folder
  if (entry.isFile) {
    found.push({ path: above + entry.name, file: await new Promise((done, fail) => entry.file(done, fail)) });
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const some = await new Promise((done, fail) => reader.readEntries(done, fail)); // at most 100 at once
    if (!some.length) return;
    for (const each of some) await walk(each, `${above}${entry.name}/`, found);
  }
}

const isZip = (path) => path.toLowerCase().endsWith(".zip");

function named(found) { // a name for the folder, and the paths in it
  const tops = new Set(found.map((each) => each.path.split("/")[0]));
  const [top] = tops;
  if (found.length === 1 && isZip(top)) return [top.slice(0, -4), found];
  const alone = tops.size === 1 && found.every((each) => each.path.includes("/"));
  const paths = found.map(({ path, file }) => {
    const inside = alone ? path.slice(top.length + 1) : path;
    return { path: isZip(inside) ? `${inside.slice(0, -4)}/${inside.split("/").pop()}` : inside, file };
  });
  return [alone ? top : "", paths];
}

async function send(all) {
  if (upload || !all.length) return;
  const [name, found] = named(all.filter((each) => !each.path.split("/").some((one) => one.startsWith("."))));
  const total = found.reduce((sum, each) => sum + each.file.size, 0);
  const leftOut = [];
  let sent = 0;
  const show = (bytes, text) => { part("bar").value = total ? Math.min(1, bytes / total) : 1; say(text); };
  upload = {};
  part("progress").hidden = false;
  try {
    const asked = new URLSearchParams({ name: part("name").value || name, bytes: total });
    const { id, limits } = await post("/upload", asked);
    upload.id = id;
    for (const [number, { path, file }] of found.entries()) {
      const what = `${number + 1} of ${found.length}: ${path}`;
      const limit = limits[path] || limits[path.slice(path.lastIndexOf(".")).toLowerCase()] || 0;
      const address = `/upload/${id}/file?${new URLSearchParams({ path, size: file.size })}`;
      const answer = await post(address, file.size <= limit ? file : "", (loaded) =>
        show(sent + loaded, `${loaded < file.size ? "Uploading" : "Checking"} ${what}`));
      leftOut.push(...answer.left_out);
      sent += file.size;
      show(sent, `Checked ${what}`);
    }
    const made = await post(`/upload/${id}/finish`, "");
    leftOut.push(...made.left_out);
    upload = null;
    part("name").value = "";
    use(made.folder);
    const left = leftOut.length ? ` Left out: ${leftOut.length}.` : "";
    say(`${made.pictures} picture${made.pictures === 1 ? " is" : "s are"} in ${made.folder}.${left}`, leftOut);
    document.body.dispatchEvent(new Event("uploaded")); // the list of folders is older
    const shown = part("shown"); // on Pictures; New run shows those of its folder
    if (shown) htmx.ajax("GET", `/data/strip?${new URLSearchParams({ place: made.folder })}`, { target: shown, swap: "innerHTML" });
  } catch (error) {
    say(error.message, leftOut);
    cancel();
  } finally {
    upload = null;
    part("progress").hidden = true;
  }
}

function cancel() {
  if (upload && upload.id) navigator.sendBeacon(`/upload/${upload.id}/cancel`);
  if (upload && upload.request) upload.request.abort();
}

function use(folder) { // as if it was typed
  const field = document.querySelector('[name="data.path"]') || document.getElementById("data-place");
  if (!field) return;
  field.value = folder;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  const open = document.getElementById("data-open");
  if (open) open.focus();
  say(`The folder is ${folder}.`);
}

for (const button of document.querySelectorAll("[data-opens]")) {
  const input = document.getElementById(button.dataset.opens);
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    const found = Array.from(input.files, (file) => ({ path: file.webkitRelativePath || file.name, file }));
    input.value = "";
    send(found);
  });
}
part("cancel").addEventListener("click", cancel);
part("folders").addEventListener("click", (event) => {
  const chosen = event.target.closest("[data-folder]");
  if (chosen) use(chosen.dataset.folder);
});
window.addEventListener("pagehide", cancel);
// the whole page takes drops: one that misses the zone would otherwise replace the page by the picture
document.addEventListener("dragover", (event) => { event.preventDefault(); part("zone").classList.add("over"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) part("zone").classList.remove("over"); });
document.addEventListener("drop", async (event) => {
  event.preventDefault();
  part("zone").classList.remove("over");
  const items = Array.from(event.dataTransfer.items).filter((item) => item.kind === "file");
  const entries = items.map((item) => item.webkitGetAsEntry()).filter(Boolean); // before any wait, which empties the list
  const files = entries.length ? [] : items.map((item) => item.getAsFile()); // of programs that drop no entries
  const found = files.map((file) => ({ path: file.name, file }));
  try {
    for (const entry of entries) await walk(entry, "", found);
  } catch {
    say("The folder could not be read. Choose its pictures instead.");
    return;
  }
  send(found);
});
