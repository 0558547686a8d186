// Runs playground.py in Pyodide, away from the page. A run that does not end is ended with its worker.

const FILES = `
  __init__ config outputs prompts text sequence block_manager swap beam_search scheduler snapshot engine trace
`.trim().split(/\s+/).map((name) => `nanopaged/${name}.py`).concat("nanopaged/page.html");

// What is fetched from the folder of Pyodide is counted, for the progress bar. Its names contain the version, so
// the browser may keep them for ever.
const fetchFile = self.fetch;
let pyodide, loaded = 0, total = 0;
function count(bytes) {
  loaded += bytes;
  postMessage({ progress: loaded, total });
}
self.fetch = async (url, options) => {
  if (!`${url}`.includes("/pyodide/")) return fetchFile(url, options);
  const response = await fetchFile(url, { ...options, cache: "force-cache" });
  const counter = new WritableStream({ write: (chunk) => count(chunk.length) });
  response.clone().body.pipeTo(counter);
  return response;
};

async function textOf(url) {
  const response = await fetchFile(url, { cache: "no-cache" });  // a file of the checkout may have changed
  if (!response.ok) throw new Error(`${url} is missing (${response.status})`);
  return response.text();
}

// `here` is the folder of the playground, `source` that of nanopaged/, both as addresses.
async function load({ here, source }) {
  const list = await fetchFile(`${here}pyodide/files.json`, { cache: "no-cache" });
  if (!list.ok) throw new Error("Pyodide is missing. Run: python docs/play/fetch.py");
  const { version, sizes } = await list.json();
  const folder = `${here}pyodide/${version}/`;
  total = Object.values(sizes).reduce((sum, size) => sum + size, 0);
  const ours = ["playground.py", "presets.json"];
  const texts = Promise.all([...FILES.map((path) => textOf(source + path)), ...ours.map((name) => textOf(here + name))]);
  const { loadPyodide } = await import(`${folder}pyodide.mjs`);
  count(sizes["pyodide.mjs"]);
  pyodide = await loadPyodide({ indexURL: folder });
  count(sizes["pyodide.asm.mjs"]);
  const paths = [...FILES, ...ours.map((name) => `docs/play/${name}`)], sources = {};
  for (const [i, text] of (await texts).entries()) {
    const file = `/repository/${paths[i]}`;
    pyodide.FS.mkdirTree(file.slice(0, file.lastIndexOf("/")));
    pyodide.FS.writeFile(file, text);
    sources[paths[i]] = text;
  }
  pyodide.runPython(`
import json, sys
sys.path.insert(0, "/repository/docs/play")
import playground
def run(text, tell):
    return json.dumps(playground.run(*json.loads(text), tell))
`);
  postMessage({ ready: true, sources });
}

function run({ settings, changes }) {
  const tell = (step, added) => postMessage({ step, added });
  const result = pyodide.globals.get("run")(JSON.stringify([settings, changes]), tell);
  postMessage({ result: JSON.parse(result) });
}

onmessage = async ({ data }) => {
  try {
    if (data.settings) run(data); else await load(data);
  } catch (error) {
    postMessage({ broken: error.message || `${error}` });
  }
};
