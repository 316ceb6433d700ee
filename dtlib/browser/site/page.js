"use strict";
// What a form asks goes to Python in a worker (worker.js); its answer, HTML, is shown below the form. Nothing is
// computed here.
const told = document.getElementById("status"), stop = document.getElementById("stop");
const rooms = new Map([...document.querySelectorAll("form.room")].map(form => [form.id, form]));
const waiting = new Map();  // room -> what it asks next, once Python has time
let worker, timer, ready = false, asked = null, shown = null, unpacked = null;

// Python

async function boot() {
  ready = false;
  told.textContent = "Python is loading; once it is here, what you move is computed anew.";
  const parts = await inlined();
  worker = new Worker(parts ? URL.createObjectURL(new Blob([parts["worker.js"]])) : "worker.js");
  worker.onmessage = ({data}) => heard(data);
  worker.onerror = event => heard({failed: event.message || "the worker could not be started"});
  worker.postMessage({start: true, parts});
}

// In a page of one file all that is loaded is in it: compressed, in letters. Null where it lies beside the page.
async function inlined() {
  const found = [...document.querySelectorAll("script[data-part]")];
  if (!found.length) return null;
  unpacked ??= Promise.all(found.map(async part => {
    const bytes = unlettered(part.textContent);
    part.textContent = "";
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return [part.dataset.part, await new Response(plain).arrayBuffer()];
  }));
  return Object.fromEntries(await unpacked);
}

function unlettered(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = letters.charCodeAt(at);
  return bytes;
}

function heard(data) {
  if (data.loads) told.textContent = `Python is loading: ${data.loads}.`;
  if (data.failed) told.textContent = `Python could not be started (${data.failed}). What you see was drawn before.`;
  if (data.ready) { ready = true; told.textContent = `Ready: Python ${data.ready}, in this page alone.`; }
  if (data.broken) anew(`Python itself has ended (${data.broken})`);
  if (data.html !== undefined) { const {form} = asked; asked = null; quiet(); show(form, data.html); }
  next();
}

function ask(form, submitter) {
  const values = Object.fromEntries(new FormData(form, submitter));
  if (submitter) for (const kept of form.querySelectorAll("input[type=hidden]")) kept.value = values[kept.name];
  waiting.set(form.id, {form, values});
  form.querySelector(".answer").setAttribute("aria-busy", "true");
  next();
}

function next() {
  if (!ready || asked || !waiting.size) return;
  const [room, question] = waiting.entries().next().value;
  waiting.delete(room);
  asked = question;
  timer = setTimeout(() => { stop.hidden = false; told.textContent = "Python computes."; }, 400);
  worker.postMessage({room, values: question.values});
}

function quiet() {
  clearTimeout(timer);
  if (!stop.hidden) told.textContent = "Ready.";
  stop.hidden = true;
}

function anew(why) {
  const form = asked?.form, said = document.createElement("div");
  worker.terminate();
  asked = null;
  quiet();
  said.className = "not-yet";
  said.setAttribute("role", "alert");
  said.textContent = `${why}. It starts anew: names on simulated ranks are gone.`;
  if (form) show(form, said.outerHTML);
  boot();
}

stop.onclick = () => anew("Python was stopped");

// The page

function show(form, html) {
  const answer = form.querySelector(".answer"), focused = document.activeElement?.id;
  answer.innerHTML = html;
  answer.setAttribute("aria-busy", "false");
  for (const data of answer.querySelectorAll("data[data-field]")) {
    const field = form.elements.namedItem(data.dataset.field);
    field.value = data.textContent;
    keep(form, field);
  }
  saveable(form);
  if (focused) document.getElementById(focused)?.focus();
  address(form);
}

function saveable(form) {
  for (const figure of form.querySelectorAll("figure")) {
    const button = Object.assign(document.createElement("button"), {type: "button", textContent: "Save the picture"});
    button.onclick = () => {
      const copy = figure.querySelector("svg").cloneNode(true);
      copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
      copy.setAttribute("style", "color:#000;background:#fff");
      const file = new Blob([new XMLSerializer().serializeToString(copy)], {type: "image/svg+xml"});
      Object.assign(document.createElement("a"), {download: `${form.id}.svg`, href: URL.createObjectURL(file)}).click();
    };
    figure.append(button);
  }
}

// #schedule=1f1b&ranks=4: the room comes first, then what differs from what it begins with.
function address(form) {
  if (form !== shown) return;
  const state = new URLSearchParams([[form.id, ""]]);
  for (const field of form.elements) {
    const first = field.options ? [...field.options].find(option => option.defaultSelected)?.value : field.defaultValue;
    if (field.name && field.type !== "submit" && (field.name === form.id || field.value !== first) && field.value.length < 1500)
      state.set(field.name, field.value);
  }
  history.replaceState(null, "", `#${state}`);
}

function follow() {
  const state = new URLSearchParams(location.hash.slice(1)), [name] = state.keys();
  shown = rooms.get(name) ?? rooms.values().next().value;
  if ([...state.values()].some(Boolean)) {
    shown.reset();
    for (const [key, value] of state) {
      const field = shown.elements.namedItem(key);
      if (field?.options && ![...field.options].some(option => option.value === value)) continue;
      if (field && value) field.value = value;
    }
  }
  for (const form of rooms.values()) form.hidden = form !== shown;
  for (const link of document.querySelectorAll("nav a"))
    link.hash === `#${shown.id}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  tell(shown);
  ask(shown);
}

function tell(form) {
  for (const output of form.querySelectorAll("output")) output.value = document.getElementById(output.htmlFor.value).value;
}

// A learner's lines survive a reload.
function keep(form, field) {
  if (field.tagName === "TEXTAREA") try { localStorage.setItem(`dtlib/${form.id}/${field.name}`, field.value); } catch {}
}
for (const form of rooms.values()) {
  for (const field of form.querySelectorAll("textarea"))
    try { field.value = localStorage.getItem(`dtlib/${form.id}/${field.name}`) ?? field.value; } catch {}
  form.addEventListener("submit", event => { event.preventDefault(); ask(form, event.submitter); });
  form.addEventListener("input", ({target}) => {
    tell(form);
    keep(form, target);
    if (!form.querySelector(".fields button")) ask(form);
  });
  form.addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.querySelector(".fields button")?.click();
  });
  saveable(form);
}
addEventListener("hashchange", follow);
follow();
boot();
