/* Runs functions of browser.py in the reader's browser, for interactive.js: [name, arguments] in, {isReady} and then {value}, which is
   JSON, or {error} out. Pyodide and the package are files of this site (mkdocs_hooks.py puts them into python/). */
"use strict";
importScripts("../python/pyodide.js");
const started = (async () => {
  const pyodide = await loadPyodide();
  const archive = await fetch("../python/nanoinfer.zip");
  pyodide.unpackArchive(await archive.arrayBuffer(), "zip");
  pyodide.runPython("import sys; sys.path.append('docs')");
  return pyodide.pyimport("browser");
})();
onmessage = async ({ data: [name, values] }) => {
  try {
    const browser = await started;
    postMessage({ isReady: true });
    postMessage({ value: browser[name](...values) });
  } catch (error) {
    const [raised] = error.message.trim().split("\n").slice(-1); // the last line of a traceback
    postMessage({ error: raised.replace("browser.MistakeError: ", "") });
  }
};
