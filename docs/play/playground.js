// The playground's page: the forms, the editor and the pictures. worker.js runs the engine.
"use strict";

const LIMIT = 10, MOST_REQUESTS = 100;  // seconds until a run is ended: a changed source may have an endless loop
const HUES = [250, 50, 95, 0, 200, 160, 125, 305];  // the viewer's
const FIELDS = {  // setting → label
  num_blocks: "blocks of the pool", block_size: "slots in a block", num_host_blocks: "host blocks",
  max_num_batched_tokens: "token budget of a step", max_num_seqs: "sequences at once", watermark: "watermark, a share",
  preemption: "preemption", enable_chunked_prefill: "chunked prefill", enable_prefix_caching: "prefix caching",
  rank: "rank of a request, smallest first",
};
const COLUMNS = { prompt: "prompt", n: "n", beam_width: "beams", max_tokens: "output", arrival: "arrives" };
const LABELS = { ...FIELDS, ...COLUMNS };
const FUNCTIONS = {  // file → what of it can be chosen in the editor
  scheduler: ["Scheduler.rank", "Scheduler.schedule", "Scheduler._admit", "Scheduler._preempt"],
  block_manager: ["BlockManager.take", "BlockManager.allocate", "BlockManager.append_slots"],
  swap: ["Swapper.swap_out"],
  beam_search: ["fork_samples", "advance_beams"],
  engine: ["LLMEngine.run_step"],
};

const $ = (id) => document.getElementById(id);
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const marked = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));  // `code` in a text
const address = (name) => new URL(document.querySelector(`meta[name="${name}"]`).content, location.href).href;
const embedded = () => document.body.classList.contains("embed");

// ── the worker ───────────────────────────────────────────────────────────────────────────────────

let worker = null, ready = null;  // a promise of what the worker says when it has loaded
let answer = null, told = 0, trace = "";  // takes the result of the present run; its step, and the trace up to there

function load() {
  ready ??= new Promise((resolve, reject) => {
    tell("Python is loaded …", 0);
    worker = new Worker("worker.js", { type: "module" });
    worker.onerror = (event) => reject(new Error(event.message || "worker.js cannot be loaded"));
    worker.onmessage = ({ data }) => {
      if (data.progress) {
        const [done, all] = [data.progress, data.total].map((bytes) => (bytes / 1e6).toFixed(1));
        tell(done > 0.9 * all ? "Python starts …" : `Python is loaded: ${done} of ${all} MB`, done / all);  // it starts while the rest is read
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

function tell(text, share) {
  $("told").textContent = text;
  $("progress").hidden = share === undefined;
  if (share !== undefined) $("progress").value = Math.min(1, share);
}

// ── settings ─────────────────────────────────────────────────────────────────────────────────────

let presets = [], preset = null, defaults, requestDefaults;
let settings = {}, beside = {};  // of the left picture; what is different in the right one

const mode = () => $("mode").value;
const differs = (name) => name in beside && beside[name] !== settings[name];

function show(given, differences, itsMode) {
  settings = { ...defaults, ...given, requests: given.requests.map((row) => ({ ...requestDefaults, ...row })) };
  beside = { ...differences };
  $("mode").value = itsMode;
  drawFields();
  drawRequests();
}

function choose(name) {
  preset = presets.find((each) => each.name === name) || presets[0];
  for (const button of $("presets").children) button.setAttribute("aria-pressed", button.value === preset.name);
  $("title").textContent = preset.title;
  for (const part of ["look", "question", "answer"]) $(part).replaceChildren(...marked(preset[part]));
  $("ask").open = false;
  $("chapter").textContent = `Chapter ${parseInt(preset.chapter, 10)} is about it`;
  $("chapter").href = address("chapters").replace("*", preset.chapter);
  $("whole").href = `#preset=${preset.name}`;
  $("knob").replaceChildren(...preset.knob.map(([label], i) => make("option", { value: i }, label)));
  show(preset.settings, preset.beside, num() ? "change" : preset.beside ? "two" : "one");
}

function inputOf(name, side, values, changed) {
  const value = values[name], label = `${FIELDS[name]}${side === "right" ? ", right picture" : ""}`;
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

function drawFields() {
  const two = mode() === "two";
  $("fields").replaceChildren(...Object.keys(FIELDS).map((name) => {
    const box = make("div", {}, inputOf(name, "left", settings, (value) => { settings[name] = value; edited(); }));
    if (two) box.append(inputOf(name, "right", { ...settings, ...beside }, (value) => { beside[name] = value; edited(); }));
    return make("fieldset", { class: name === "rank" ? "field wide" : "field" }, make("legend", {}, FIELDS[name]), box);
  }));
  drawDifferences();
}

// A setting of the right picture that was not changed follows the left one.
function drawDifferences() {
  for (const name of mode() === "two" ? Object.keys(FIELDS) : []) {
    const right = $(`${name}-right`);
    if (!(name in beside)) right[right.type === "checkbox" ? "checked" : "value"] = settings[name];
    right.classList.toggle("differs", differs(name));
  }
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
  drawDifferences();
  history.pushState(null, "", link());
  $("edited").hidden = false;
  run();
}
function link() {
  const wanted = { ...settings, ...(mode() === "two" ? { beside } : {}) };
  return `#preset=${preset.name}&settings=${encodeURIComponent(JSON.stringify(wanted))}`;
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
  return [{ ...given, requests: rows }, differences, differences ? "two" : "one"];
}

// #preset=NAME, with &embed or &settings=JSON. The rank of a link is code of its author: it waits for the reader.
function open() {
  const parts = new URLSearchParams(location.hash.slice(1)), given = parts.get("settings");
  document.body.classList.toggle("embed", parts.has("embed"));
  choose(parts.get("preset"));
  problem();
  $("edited").hidden = !given;
  try {
    if (given) show(...parse(given));
  } catch (error) {
    const why = error.constructor === Error ? error.message : "its settings cannot be read";
    draw([]);
    return problem(`The link cannot be opened: ${why}. The form has the settings of the example.`);
  }
  if (!embedded() && !(given && (settings.rank || beside.rank))) return run();
  draw([]);
  tell(embedded() ? "Run loads Python for the browser: 13.5 MB, once." : "The link has a rank, which is code. Read it, then press Run.");
}

// ── the source, and its changes ──────────────────────────────────────────────────────────────────

let sources = {};     // file → its text in the checkout
const changes = {};   // file → its text with the reader's changes; kept while the file in the checkout stays the same
let view = null;      // what the editor shows: { path, before, after }, the lines of the file around its text

const PATHS = Object.keys(FUNCTIONS).map((file) => `nanopaged/${file}.py`);
const num = () => Object.keys(changes).length;
function keep(path, value) {  // what is kept of a file; with a value, keep that, null for no change
  const key = `nanopaged playground: ${path}`;
  try {  // each tab has its own changes, and begins with the last ones of all tabs
    if (value !== undefined) for (const storage of [sessionStorage, localStorage]) storage.setItem(key, JSON.stringify(value));
    return JSON.parse(sessionStorage.getItem(key) ?? localStorage.getItem(key));
  } catch { return null; }  // no storage: a change lasts until the page is closed
}

async function openSource() {
  if (view !== null) return;
  ({ sources } = await load());
  for (const path of PATHS) {
    const kept = keep(path);
    if (kept?.of === sources[path]) changes[path] = kept.text; else if (kept) keep(path, null);
  }
  $("function").replaceChildren(...Object.entries(FUNCTIONS).map(([file, names]) =>
    make("optgroup", { label: `${file}.py` }, ...[...names, `all of ${file}.py`].map((name) => make("option", { value: `${file} ${name}` }, name)))));
  edit();
}

// The lines of a function, or of the statement that sets an attribute: [first, one past the last]. All if it is not there.
function rangeOf(lines, name) {
  const [scope, member] = name.includes(".") ? name.split(".") : ["", name];
  const from = scope ? lines.findIndex((line) => line.startsWith(`class ${scope}`)) : 0;
  const begins = new RegExp(`^\\s*(def ${member}\\(|self\\.${member}: )`);
  const first = from < 0 ? -1 : lines.findIndex((line, i) => i >= from && begins.test(line));
  if (first < 0) return [0, lines.length];
  const indent = (line) => line.search(/\S/);
  let past = lines.findIndex((line, i) => i > first && line.trim() && indent(line) <= indent(lines[first]) && !line.trim().startsWith(")"));
  if (past < 0) past = lines.length;
  while (!lines[past - 1].trim()) past--;
  return [first, past];
}

function edit() {
  const [file, ...words] = $("function").value.split(" "), path = `nanopaged/${file}.py`;
  const lines = (changes[path] ?? sources[path]).split("\n"), [first, past] = rangeOf(lines, words.join(" "));
  view = { path, before: lines.slice(0, first), after: lines.slice(past) };
  $("text").value = lines.slice(first, past).join("\n");
  $("text").scrollTop = 0;
  drawNumbers();
}

function typed() {
  const { path, before, after } = view, text = [...before, $("text").value, ...after].join("\n");
  if (text === sources[path]) delete changes[path]; else changes[path] = text;
  keep(path, path in changes ? { of: sources[path], text } : null);
  if (mode() === "one" && path in changes) $("mode").value = "change";
  drawNumbers();
}

function drawNumbers(wrong) {
  const first = view.before.length + 1, length = $("text").value.split("\n").length;
  $("text").rows = Math.min(length + 1, 24);
  $("numbers").replaceChildren(...Array.from({ length }, (_, i) =>
    (first + i === wrong ? make("span", { class: "wrong" }, `${first + i}`) : `${first + i}\n`)));
  $("numbers").scrollTop = $("text").scrollTop;
  $("changed").textContent = num() ? `changed: ${Object.keys(changes).join(", ")}` : "and see before and after side by side";
}

// Mark the line of an error, if the editor shows it; `anywhere` shows the whole file if its function does not have it.
function mark({ file, line }, anywhere) {
  if (file === "rank") for (const side of ["left", "right"]) $(`rank-${side}`)?.setAttribute("aria-invalid", "true");
  if (!(file in changes)) return;
  $("source").open = true;
  const [name] = file.match(/\w+(?=\.py)/);
  if (anywhere) $("function").value = `${name} all of ${name}.py`, edit();
  if (view.path !== file) return;
  drawNumbers(line);
  const high = $("text").scrollHeight / $("text").value.split("\n").length;
  $("text").scrollTop = Math.max(0, (line - view.before.length) * high - $("text").clientHeight / 2);
}

$("text").oninput = typed;
$("text").onscroll = () => { $("numbers").scrollTop = $("text").scrollTop; };
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
  const differ = Object.keys(FIELDS).filter(differs), change = num() ? `your change of ${Object.keys(changes).join(", ")}` : "";
  if (mode() === "two" && differ.length) {
    const right = { ...settings, ...beside }, title = (values) => [listed(differ, values), change].filter(Boolean).join(", ");
    return [[title(settings), settings, changes], [title(right), right, changes]];
  }
  if (mode() === "change") return [["the source", settings, {}], [change || "no change yet", settings, changes]];
  return [[change, settings, changes]];
}

async function run() {
  again = running;
  if (running) return;
  running = true;
  problem();
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  if (view !== null) drawNumbers();
  try {
    const pictures = [];
    for (const [title, its, itsChanges] of wanted()) pictures.push([title, await compute(its, itsChanges)]);
    tell("Ready.");
    draw(pictures);
  } catch (error) {
    tell("");
    problem(error.message);
  }
  running = false;
  document.body.dataset.runs = Number(document.body.dataset.runs || 0) + 1;  // for the tests
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
    button.onclick = () => { mark(failure, true); $("text").focus(); };
    parts.push(" ", button);
  }
  return parts;
}

function draw(pictures) {
  const refused = pictures.map(([, { failure }]) => failure).find((failure) => failure && !failure.step);
  if (refused) problem(...sentence(refused));
  if (refused?.kind === "settings") {
    const [, number, name] = refused.message.match(/^(?:request (\d+): )?(\w+)/) || [];
    const field = number ? $("requests").children[number - 1]?.querySelector(`[name="${name}"]`) : $(`${name}-left`);
    field?.setAttribute("aria-invalid", "true");
  }
  for (const [, { failure }] of pictures) if (failure?.file) mark(failure);
  $("printed").hidden = !pictures.some(([, { printed }]) => printed);
  $("printed").lastChild.textContent = pictures.map(([, { printed }]) => printed).filter(Boolean).join("\n──\n");
  const drawn = pictures.filter(([, { page }]) => page);
  $("old").hidden = drawn.length > 0 || !$("pictures").children.length;
  if (!drawn.length) return;  // those of the last run stay, and are marked
  for (const { src } of document.querySelectorAll("iframe")) URL.revokeObjectURL(src.split("#")[0]);
  $("pictures").replaceChildren(...drawn.map(([title, { page, failure }]) => {
    const url = URL.createObjectURL(new Blob([page], { type: "text/html" }));
    const frame = make("iframe", { src: `${url}#${failure?.step || current || preset.step || 1}`, title: title || "What happens, step by step" });
    frame.onload = () => frame.contentWindow.addEventListener("trace-step", ({ detail }) => {  // its reader has moved
      current = `${detail.step}-${detail.part}`;
      for (const other of document.querySelectorAll("iframe")) if (other !== frame) other.contentWindow.trace?.go(detail.step, detail.part);
    });
    return make("figure", {}, ...(title ? [make("b", {}, title)] : []),
      ...(failure?.step ? [make("p", { class: "problem", role: "alert" }, ...sentence(failure))] : []), frame,
      make("figcaption", {}, make("a", { href: url, target: "_blank" }, "alone in a window"), make("a", { href: url, download: "run.html" }, "save")));
  }));
}

function problem(...parts) {
  $("problem").replaceChildren(...parts);
  $("problem").hidden = parts.length === 0;
}

// ── the controls ─────────────────────────────────────────────────────────────────────────────────

$("mode").onchange = () => {
  $("source").open ||= mode() === "change";
  drawFields();
  edited();
};
$("add").onclick = () => {
  settings.requests.push({ ...requestDefaults, prompt: "the king sits in his hall" });
  drawRequests();
  $("requests").lastChild.querySelector("input").focus();
  edited();
};
$("share").onclick = () => {
  history.replaceState(null, "", link());
  navigator.clipboard?.writeText(location.href).catch(() => {});
  $("share").textContent = "The address of this page is the link";
};
$("source").ontoggle = () => { if ($("source").open) openSource().catch((error) => problem(error.message)); };
$("function").onchange = edit;
$("reset").onclick = () => {
  for (const path of Object.keys(changes)) keep(path, null), delete changes[path];
  if (mode() === "change") $("mode").value = "one";
  edit();
  run();
};
$("knob").onchange = () => {
  show({ ...preset.settings, ...preset.knob[$("knob").value][1] }, {}, "one");
  run();
};
for (const button of document.querySelectorAll(".run")) button.onclick = run;
document.onkeydown = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); };
window.onhashchange = () => { current = ""; open(); };

async function begin() {
  if (location.protocol === "file:") {
    throw new Error("A browser runs no Python from a file. At the project's root: python -m http.server, then open http://localhost:8000/docs/play/");
  }
  ({ engine: defaults, request: requestDefaults, presets } = await (await fetch("presets.json", { cache: "no-cache" })).json());
  defaults.rank = "";
  $("presets").replaceChildren(...presets.map(({ name, title, chapter }) => {
    const button = make("button", { type: "button", value: name, "aria-pressed": "false" }, `${parseInt(chapter, 10)}. ${title}`);
    button.onclick = () => { location.hash = `preset=${name}`; };
    return button;
  }));
  if (!location.hash.includes("embed") && PATHS.some((path) => keep(path))) await openSource();
  $("source").open = num() > 0;
  open();
}
begin().catch((error) => problem(error.message));
