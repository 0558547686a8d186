// The playground's page: the forms, the editor and the pictures. worker.js runs the engine.
"use strict";

const LIMIT = 10, MOST_REQUESTS = 100;  // seconds until a run is ended: a changed source may have an endless loop
const HUES = [250, 50, 95, 0, 200, 160, 125, 305];  // the viewer's
const FIELDS = {  // setting → label
  num_blocks: "blocks of the pool", block_size: "slots in a block", num_host_blocks: "host blocks",
  max_num_batched_tokens: "token budget of a step", max_num_seqs: "sequences together", watermark: "watermark, a share",
  preemption: "preemption", enable_chunked_prefill: "chunked prefill", enable_prefix_caching: "prefix caching",
  rank: "rank of a request, smallest first",
};
const COLUMNS = { prompt: "prompt", n: "n", beam_width: "beams", max_tokens: "output", arrival: "arrives" };
const LABELS = { ...FIELDS, ...COLUMNS };
// What the editor offers: these files, from each of their functions on.
const PATHS = ["scheduler", "block_manager", "swap", "beam_search", "engine"].map((name) => `nanopaged/${name}.py`);

const $ = (id) => document.getElementById(id);
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const marked = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));  // `code` in a text
const address = (name) => new URL(document.querySelector(`meta[name="${name}"]`).content, location.href).href;
const frames = () => document.querySelectorAll("iframe");
const embedded = () => document.body.classList.contains("embed");

// ── the worker ───────────────────────────────────────────────────────────────────────────────────

let worker = null, ready = null;  // a promise of what the worker says when it has loaded
let answer = null, told = 0, trace = "";  // takes the result of the present run; its step, and the trace up to there

function load() {
  ready ??= new Promise((resolve, reject) => {
    tell("Python is loading …");
    worker = new Worker("worker.js", { type: "module" });
    worker.onerror = (event) => reject(new Error(event.message || "worker.js cannot be loaded"));
    worker.onmessage = ({ data }) => {
      if (data.progress) {
        const [done, all] = [data.progress, data.total].map((bytes) => (bytes / 1e6).toFixed(1));
        tell(done > 0.9 * all ? "Python starts …" : `Python: ${done} of ${all} MB`);  // it starts while the rest is read
      } else if (data.ready) resolve(data);
      else if (data.step) {
        trace += data.added;
        tell(`Step ${told = data.step} …`);
      } else if (data.result) answer?.(data.result);
      else if (data.broken && answer) {
        end();
        answer({ failure: { kind: "broken", message: data.broken.trim().split("\n").at(-1) } });
      } else if (data.broken) reject(new Error(data.broken));
    };
    worker.postMessage({ here: new URL(".", location.href).href, source: address("source") });
  });
  return ready;
}

function end() {  // of the worker, with what it computes; the next one is loaded at once
  worker?.terminate();
  ready = null;
  load().then(() => tell("Ready."), () => {});
}

// The result of a run, as playground.run returns it. It ends after LIMIT seconds, or when the reader stops it.
async function compute(settings, changes) {
  await load();
  return new Promise((resolve) => {
    const stop = (event) => {
      const message = `The run was stopped${event ? "" : ` after ${LIMIT} seconds`}, in step ${told}. ${num() ? "A changed loop may have no end." : "Fewer tokens take less time."}`;
      end();
      answer({ page: told > 1 ? trace : null, failure: { kind: "stopped", message, step: told - 1 } });
    };
    const timer = setTimeout(stop, LIMIT * 1000);
    tell(`Step ${told = 1} …`);
    trace = "";
    $("stop").hidden = false;
    $("stop").onclick = stop;
    answer = (result) => {
      answer = $("stop").onclick = null;
      clearTimeout(timer);
      $("stop").hidden = true;
      resolve(result);
    };
    worker.postMessage({ settings, changes });
  });
}

const tell = (text) => { $("told").textContent = text; };

// ── settings ─────────────────────────────────────────────────────────────────────────────────────

let presets = [], preset = null, defaults, requestDefaults;
let runs = {}, viewer = "";  // preset → the traces of its pictures, recorded; the page that shows a trace
let settings = {}, beside = null;  // of the first picture; what is different in a second one, if there is one

const differs = (name) => beside !== null && name in beside && beside[name] !== settings[name];

function show(given, differences) {
  settings = { ...defaults, ...given, requests: given.requests.map((row) => ({ ...requestDefaults, ...row })) };
  beside = differences ? { ...differences } : null;
  drawFields();
  drawRequests();
}

function choose(name) {
  preset = presets.find((each) => each.name === name) || presets[0];
  $("choice").value = preset.name;
  const texts = { ...preset, "further-question": preset.further[0], "further-answer": preset.further[1] };
  for (const part of ["title", "setup", "question", "answer", "further-question", "further-answer"]) {
    $(part).replaceChildren(...marked(texts[part]));
  }
  $("ask").open = $("further").open = false;
  $("chapter").textContent = `Chapter ${parseInt(preset.chapter, 10)} of the book explains it`;
  $("chapter").href = address("chapters").replace("*", preset.chapter);
  $("whole").href = `#preset=${preset.name}`;
  $("knob").replaceChildren(...preset.knob.map(([label], i) => make("option", { value: i }, label)));
  show(preset.settings, preset.beside);
}

function inputOf(name, side, values, changed) {
  const value = values[name], label = `${FIELDS[name]}${side === "right" ? ", second picture" : ""}`;
  const attributes = { id: `${name}-${side}`, "aria-label": label, title: name };
  const type = { boolean: "checkbox", string: "text", number: "number" }[typeof defaults[name]];
  const input = name === "preemption" ? make("select", attributes, ...["swap", "recompute"].map((way) => make("option", {}, way)))
    : make("input", { ...attributes, type, min: 0, step: name === "watermark" ? 0.05 : 1 });
  if (name === "rank") input.placeholder = "lambda request: request.arrival_time";
  input[input.type === "checkbox" ? "checked" : "value"] = value;
  input.onchange = () => changed(valueOf(input));
  return input;
}
const valueOf = (input) => (input.type === "checkbox" ? input.checked
  : input.type === "number" ? (input.value === "" ? null : Number(input.value)) : input.value);

// A setting of the second picture that was not changed is that of the first one.
function drawFields() {
  const focused = document.activeElement?.id;
  $("fields").replaceChildren(...Object.keys(FIELDS).map((name) => {
    const box = make("div", {}, inputOf(name, "left", settings, (value) => { settings[name] = value; edited(); }));
    if (beside) box.append(inputOf(name, "right", { ...settings, ...beside }, (value) => { beside[name] = value; edited(); }));
    box.lastChild.classList.toggle("differs", differs(name));
    return make("fieldset", { class: name === "rank" ? "field wide" : "field" }, make("legend", {}, FIELDS[name]), box);
  }));
  if (focused) $(focused)?.focus();
  $("compare").setAttribute("aria-pressed", beside !== null);
}

// Requests are named in order of arrival, as the recorder does it.
function drawRequests() {
  const rows = settings.requests, order = rows.map((row, i) => i).sort((a, b) => rows[a].arrival - rows[b].arrival || a - b);
  $("requests").replaceChildren(...rows.map((row, i) => {
    const place = order.indexOf(i), before = place >= 26 ? String.fromCharCode(64 + Math.floor(place / 26)) : "";
    const name = make("span", { class: "name" }, before + String.fromCharCode(65 + (place % 26)));
    name.style.background = `oklch(0.82 0.09 ${HUES[place % HUES.length]})`;
    const inputs = Object.entries(COLUMNS).map(([column, words]) => {
      const text = column === "prompt";
      const input = make("input", { name: column, "aria-label": `${words} of request ${i + 1}`, value: row[column],
        ...(text ? {} : { type: "number", min: column === "beam_width" ? 0 : 1 }) });
      input.onchange = () => { row[column] = valueOf(input); if (column === "arrival") drawRequests(); edited(); };
      return make("label", text ? { class: "prompt" } : {}, text ? "" : words, input);
    });
    const remove = make("button", { type: "button", "aria-label": `Remove request ${i + 1}` }, "Remove");
    remove.onclick = () => { rows.splice(i, 1); drawRequests(); $("add").focus(); edited(); };
    return make("fieldset", { class: "request" }, name, ...inputs, remove);
  }));
}

function edited() {  // the settings: they are in the address, so that Back takes the change back, and run at once
  drawFields();
  const text = JSON.stringify({ ...settings, ...(beside ? { beside } : {}) });
  history.pushState(null, "", `#preset=${preset.name}&settings=${encodeURIComponent(text)}`);
  $("edited").hidden = false;
  run();
}

// The arguments of `show`. Raises an error for settings that the form cannot hold; the engine checks their values.
function parse(text) {
  const { beside: differences, requests: rows = [], ...given } = JSON.parse(text);
  if (rows.length > MOST_REQUESTS) throw new Error(`it has ${rows.length} requests, and the playground allows ${MOST_REQUESTS}`);
  for (const [values, known] of [[given, defaults], [differences || {}, defaults], ...rows.map((row) => [row, requestDefaults])]) {
    for (const [name, value] of Object.entries(values)) {
      if (typeof value !== typeof known[name]) throw new Error(`it has ${JSON.stringify(value)} for “${name}”`);
    }
  }
  return [{ ...given, requests: rows }, differences];
}

// #preset=NAME, with &embed or &settings=JSON. The rank of a link is code of its author: it waits for the reader.
function open() {
  const parts = new URLSearchParams(location.hash.slice(1)), given = parts.get("settings");
  document.body.classList.toggle("embed", parts.has("embed"));
  choose(parts.get("preset"));
  problem();
  $("edited").hidden = !given;
  $("set").open ||= Boolean(given);
  try {
    if (given) show(...parse(given));
  } catch (error) {
    const why = error.constructor === Error ? error.message : "its settings cannot be read";
    draw([]);
    return problem(`The link cannot be opened: ${why}. The form has the settings of the example.`);
  }
  if (given && (settings.rank || beside?.rank)) {
    draw([]);
    return tell("The link has a rank, which is code. Read it, then press Run.");
  }
  if (given || num()) return run();
  draw(wanted().map(([title], i) => [title, { page: viewer + runs[preset.name][i] }]));  // Python can wait
  if (!embedded()) load().then(() => running || tell("Ready."), (error) => { tell(""); problem(error.message); });
}

// ── the source, and its changes ──────────────────────────────────────────────────────────────────

let sources = {};     // file → its text in the checkout
const changes = {};   // file → its text with the reader's changes; kept while the file in the checkout stays the same
let view = null;      // the file that the editor shows

const num = () => Object.keys(changes).length;
function keep(path, value) {  // what is kept of a file; with a value, keep that, null for no change
  const key = `nanopaged playground: ${path}`;
  try {
    if (value !== undefined) localStorage.setItem(key, JSON.stringify(value));
    return JSON.parse(localStorage.getItem(key));
  } catch { return null; }  // no storage: a change lasts until the page is closed
}

async function openSource() {
  if (view !== null) return;
  ({ sources } = await load());
  for (const path of PATHS) {
    const kept = keep(path);
    if (kept?.of === sources[path]) changes[path] = kept.text; else if (kept) keep(path, null);
  }
  $("function").replaceChildren(...PATHS.map((path) => {
    const names = [...sources[path].matchAll(/^ *def (\w+)/gm)].map((match) => match[1]);
    return make("optgroup", { label: path }, ...names.map((name) => make("option", { value: `${path} ${name}` }, name)));
  }));
  edit();
}

function edit() {
  const [path, name] = $("function").value.split(" ");
  view = path;
  $("text").value = changes[view] ?? sources[view];
  typed();
  leadTo($("text").value.split("\n").findIndex((each) => each.trim().startsWith(`def ${name}(`)));
}

// Select a line, and scroll to it.
function leadTo(line) {
  const lines = $("text").value.split("\n"), start = lines.slice(0, line).join("\n").length + (line > 0);
  $("text").setSelectionRange(start, start + (lines[line] || "").length);
  $("text").scrollTop = line * $("text").scrollHeight / lines.length;
}

function typed() {
  const text = $("text").value;
  if (text === sources[view]) delete changes[view]; else changes[view] = text;
  keep(view, view in changes ? { of: sources[view], text } : null);
  $("changed").textContent = num() ? `changed: ${Object.keys(changes).join(", ")}` : "and see before and after side by side";
}

$("text").oninput = typed;
$("text").onkeydown = (event) => {
  const { selectionStart: start, value } = $("text"), line = value.slice(value.lastIndexOf("\n", start - 1) + 1, start);
  if (event.key === "Escape") $("text").blur();  // then Tab goes on from here
  const enters = event.key === "Enter" && !event.ctrlKey && !event.metaKey;
  if (!enters && (event.key !== "Tab" || event.shiftKey)) return;
  event.preventDefault();
  const indent = `\n${line.match(/^ */)[0]}${/:\s*$/.test(line) ? "    " : ""}`;
  document.execCommand("insertText", false, enters ? indent : " ".repeat(4 - (line.length % 4)));  // it can be undone
};

// ── runs and pictures ────────────────────────────────────────────────────────────────────────────

let running = false, again = false, current = "";  // the step that is shown, and its part: "12-scheduled"

const written = (value) => (value === true ? "on" : value === false ? "off" : value === "" ? "the order of arrival" : `${value}`);
const listed = (names, values) => names.map((name) => `${FIELDS[name].split(",")[0]}: ${written(values[name])}`).join(", ");

// The pictures to show: a title, settings and changes for each.
function wanted() {
  const differ = Object.keys(FIELDS).filter(differs), right = { ...settings, ...beside };
  if (num()) return [["the source", settings, {}], [`your change of ${Object.keys(changes).join(", ")}`, settings, changes]];
  if (!differ.length) return [["", settings, {}]];
  return [[listed(differ, settings), settings, {}], [listed(differ, right), right, {}]];
}

function busy(on) {  // the status is shown
  running = on;
  document.body.classList.toggle("busy", on);
}

async function run() {
  again = running;
  if (running) return;
  busy(true);
  problem();
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  try {
    const pictures = [];
    for (const [title, its, itsChanges] of wanted()) pictures.push([title, await compute(its, itsChanges)]);
    tell("Ready.");
    draw(pictures);
  } catch (error) {
    tell("");
    problem(error.message);
  }
  busy(false);
  if (again) run();
}

// The sentence of a failure, and a button that leads to its line.
function sentence(failure) {
  const place = failure.file ? ` (${failure.file}, line ${failure.line})` : "";
  const begin = { source: failure.step ? `Step ${failure.step} failed. ` : "", invariant: `After step ${failure.step} an invariant is broken: ` };
  const labelled = failure.message.replace(/\w+_\w+|arrival/g, (name) => (name in LABELS ? `“${LABELS[name]}”` : name));
  const parts = [`${begin[failure.kind] || ""}${failure.kind === "settings" ? labelled : failure.message}${place}`];
  if (failure.file in changes) {
    const button = make("button", { type: "button" }, "Show the line");
    button.onclick = () => {
      $("source").open = true;
      $("function").querySelector(`[label="${failure.file}"] option`).selected = true;
      edit();
      leadTo(failure.line - 1);
      $("text").focus();
    };
    parts.push(" ", button);
  }
  return parts;
}

function draw(pictures) {
  if (pictures.length) document.body.dataset.runs = Number(document.body.dataset.runs || 0) + 1;  // for the tests
  const refused = pictures.map(([, { failure }]) => failure).find((failure) => failure && !failure.step);
  if (refused) problem(...sentence(refused));
  if (refused?.kind === "settings") {
    const [, number, name] = refused.message.match(/^(?:request (\d+): )?(\w+)/) || [];
    const field = number ? $("requests").children[number - 1]?.querySelector(`[name="${name}"]`) : $(`${name}-left`);
    field?.setAttribute("aria-invalid", "true");
  }
  const isRank = pictures.some(([, { failure }]) => failure?.file === "rank");
  for (const side of isRank ? ["left", "right"] : []) $(`rank-${side}`)?.setAttribute("aria-invalid", "true");
  $("printed").hidden = !pictures.some(([, { printed }]) => printed);
  $("printed").lastChild.textContent = pictures.map(([, { printed }]) => printed).filter(Boolean).join("\n──\n");
  const drawn = pictures.filter(([, { page }]) => page);
  $("old").hidden = drawn.length > 0 || !$("pictures").children.length;
  if (!drawn.length) return;  // those of the last run stay, and are marked
  for (const { src } of frames()) URL.revokeObjectURL(src.split("#")[0]);
  $("pictures").replaceChildren(...drawn.map(([title, { page, failure }]) => {
    const url = URL.createObjectURL(new Blob([page], { type: "text/html" }));
    const frame = make("iframe", { src: `${url}#${failure?.step || current || ($("ask").open ? preset.step : preset.from)}`, title: title || "What happens, step by step" });
    frame.onload = () => frame.contentWindow.addEventListener("trace-step", ({ detail }) => {  // its reader has moved
      current = `${detail.step}-${detail.part}`;
      for (const other of frames()) if (other !== frame) other.contentWindow.trace?.go(detail.step, detail.part);
    });
    return make("figure", {}, ...(title ? [make("b", {}, title)] : []),
      ...(failure?.step ? [make("p", { class: "problem", role: "alert" }, ...sentence(failure))] : []), frame,
      make("figcaption", {}, make("a", { href: url, target: "_blank" }, "alone in a window")));
  }));
}

function problem(...parts) {
  $("problem").replaceChildren(...parts);
  $("problem").hidden = parts.length === 0;
}

// ── the controls ─────────────────────────────────────────────────────────────────────────────────

$("compare").onclick = () => {
  beside = beside ? null : {};
  edited();
};
$("add").onclick = () => {
  settings.requests.push({ ...requestDefaults, prompt: "the king sits in his hall" });
  drawRequests();
  $("requests").lastChild.querySelector("input").focus();
  edited();
};
$("ask").ontoggle = () => {  // the answer is in the pictures, too
  for (const { contentWindow } of $("ask").open ? frames() : []) contentWindow.location.hash = preset.step;
};
$("source").ontoggle = () => { if ($("source").open) openSource().catch((error) => problem(error.message)); };
$("function").onchange = edit;
$("reset").onclick = () => {
  for (const path of Object.keys(changes)) keep(path, null), delete changes[path];
  edit();
  run();
};
$("knob").onchange = () => {
  show({ ...preset.settings, ...preset.knob[$("knob").value][1] }, null);
  run();
};
for (const button of document.querySelectorAll(".run")) button.onclick = run;
document.onkeydown = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); };
window.onhashchange = () => { current = ""; open(); };

async function begin() {
  if (location.protocol === "file:") {
    throw new Error("A browser runs no Python from a file. At the project's root: python -m http.server, then open http://localhost:8000/docs/play/");
  }
  const files = ["presets.json", "runs.json", `${address("source")}nanopaged/page.html`];
  const texts = await Promise.all(files.map(async (file) => (await fetch(file, { cache: "no-cache" })).text()));
  ({ engine: defaults, request: requestDefaults, presets } = JSON.parse(texts[0]));
  runs = JSON.parse(texts[1]);
  viewer = texts[2];
  defaults.rank = "";
  for (const group of new Set(presets.map((each) => each.group))) {
    const options = presets.filter((each) => each.group === group)
      .map(({ name, title }) => make("option", { value: name }, title));
    $("choice").append(make("optgroup", { label: group }, ...options));
  }
  $("choice").onchange = ({ target }) => { location.hash = `preset=${target.value}`; };
  if (!location.hash.includes("embed") && PATHS.some((path) => keep(path))) await openSource();
  $("source").open = num() > 0;
  open();
}
begin().catch((error) => problem(error.message));
