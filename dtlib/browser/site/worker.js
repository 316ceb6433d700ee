// Python, with dtlib's own files, in a thread beside the page: the page lives while they load, compute, or never end.
let answer;
// A page from a file can have no module worker. pyodide asks for one, and finds out by calling importScripts, which it
// has no other use for.
self.importScripts = () => { throw new TypeError("modules are imported here"); };

async function start(parts) {
  postMessage({loads: "the interpreter, 13 MB the first time"});
  const {loadPyodide, options, files} = await (parts ? fromMemory(parts) : fromFolder());
  const python = await loadPyodide(options);
  postMessage({loads: "the course's own files"});
  python.unpackArchive(files, "zip");
  answer = python.runPython(`
    import json, sys
    from dtlib.browser.pages import answer
    lambda room, asked: answer(room, json.loads(asked))
  `);
  return python.runPython("sys.version.split()[0]");
}

async function fromFolder() {
  const here = new URL("./", location.href).href;
  const [{loadPyodide}, files] = await Promise.all([
    import(`${here}pyodide/pyodide.mjs`), fetch(`${here}dtlib.zip`).then(reply => reply.arrayBuffer()),
  ]);
  return {loadPyodide, options: {indexURL: `${here}pyodide/`}, files};
}

// A page that is opened from a file may neither import nor fetch: modules come as blobs, and fetch gives what is here.
async function fromMemory(parts) {
  const module = name => import(URL.createObjectURL(new Blob([parts[name]], {type: "text/javascript"})));
  const types = {"pyodide.asm.wasm": "application/wasm", "python_stdlib.zip": "application/zip"};
  self.fetch = async what => {
    const name = String(what.url ?? what).split("/").pop();
    if (!types[name]) throw new Error(`a page of one file fetches nothing, and was asked for ${what}`);
    return new Response(parts[name], {headers: {"Content-Type": types[name]}});
  };
  const [{loadPyodide}, {default: createPyodideModule}] = [await module("pyodide.mjs"), await module("pyodide.asm.mjs")];
  const nowhere = "https://invalid.invalid/";
  const info = {arch: "wasm32", platform: "emscripten", version: "0", python: "3.14", abi_version: "2026_0"};
  const options = {createPyodideModule, lockFileContents: {info, packages: {}}, packageBaseUrl: nowhere, indexURL: nowhere};
  return {loadPyodide, options, files: parts["dtlib.zip"]};
}

onmessage = async ({data}) => {
  try {
    postMessage(data.start ? {ready: await start(data.parts)} : {html: answer(data.room, JSON.stringify(data.values))});
  } catch (problem) {
    postMessage({[data.start ? "failed" : "broken"]: String(problem).split("\n")[0]});
  }
};
