// The driver of JavaScript contexts: reads requests, evaluates code as a notebook does, reports what came of it.
//
// The engine's own "REPL mode" (what the console of a browser uses) keeps `let`, `const` and `class` from cell to cell,
// allows them to be declared again, and allows `await` at the top level. Guards against code that closes or replaces
// its standard streams, and against timers and promises of an earlier cell that show something in a later one.
// The words spoken with the other side are in interpreter.py.
"use strict";

const { AsyncLocalStorage } = require("node:async_hooks");
const fs = require("node:fs");
const inspector = require("node:inspector");
const { createRequire, isBuiltin } = require("node:module");
const net = require("node:net");
const path = require("node:path");
const { Writable } = require("node:stream");
const { pathToFileURL } = require("node:url");
const util = require("node:util");
const vm = require("node:vm");

const [, , requestsPath, messagesPath] = process.argv;
process.argv.splice(1);

const JSON_NODES = 100_000; // members of a value that get application/json, counted through all levels
const DISPLAY = Symbol.for("Jupyter.display"); // as other JavaScript kernels have it: () => {MIME type: content}

// --- messages -------------------------------------------------------------------------------------------------------

// Opened here, so close-on-exec: programs that code starts never have them.
const messages = fs.openSync(messagesPath, "w");

function say(text, content) {
  let bytes = Buffer.from(text + "\n");
  if (content !== undefined) bytes = Buffer.concat([bytes, content]);
  writeAll(messages, bytes);
}

function writeAll(descriptor, bytes) {
  for (let done = 0; done < bytes.length; ) {
    try {
      done += fs.writeSync(descriptor, bytes, done);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1);
    }
  }
}

function part(nonce, name, value) {
  const content = Buffer.isBuffer(value) ? value : ArrayBuffer.isView(value)
    ? Buffer.from(value.buffer, value.byteOffset, value.byteLength)
    : Buffer.from(typeof value === "string" ? value : JSON.stringify(value));
  say(`part ${nonce} ${name.replace(/[\s]/g, "_")} ${content.length}`, content);
}

// --- standard streams -----------------------------------------------------------------------------------------------

// Written at once and in order, unlike node's own, which may keep output back when the process ends.
class Output extends Writable {
  constructor(descriptor) {
    super({ decodeStrings: true, emitClose: false });
    this.fd = descriptor;
  }
  [util.inspect.custom]() {
    return `<${names[this.fd]}>`;
  }
  _write(bytes, encoding, callback) {
    try {
      writeAll(this.fd, bytes);
      callback();
    } catch (error) {
      callback(error);
    }
  }
}

const kept = { 1: fs.openSync("/dev/fd/1", "w"), 2: fs.openSync("/dev/fd/2", "w") };
const identity = { 1: fs.fstatSync(1).ino, 2: fs.fstatSync(2).ino };
const names = { 1: "stdout", 2: "stderr" };

function repairStreams() {
  for (const descriptor of [1, 2]) {
    let found = null;
    try {
      found = fs.fstatSync(descriptor).ino;
    } catch {
      // closed
    }
    if (found !== identity[descriptor]) {
      if (found !== null) fs.closeSync(descriptor);
      const spare = [];
      // The kernel gives out the lowest free number: what lies below is taken first.
      for (;;) {
        const opened = fs.openSync(`/dev/fd/${kept[descriptor]}`, "w");
        if (opened >= descriptor) break;
        spare.push(opened);
      }
      spare.forEach((opened) => fs.closeSync(opened));
      process.stderr.write(`[ringfence] fd ${descriptor} had been closed or redirected by an earlier cell; restored\n`);
    }
    const stream = process[names[descriptor]];
    if (!(stream instanceof Output) || stream.destroyed || stream.writableEnded || stream.fd !== descriptor) {
      const fresh = new Output(descriptor);
      fresh.on("error", () => {});
      Object.defineProperty(process, names[descriptor], { value: fresh, configurable: true, writable: true, enumerable: true });
      console["_" + names[descriptor]] = fresh;
    }
  }
}

// --- results --------------------------------------------------------------------------------------------------------

const execution = new AsyncLocalStorage(); // the nonce of the cell that a timer or promise comes from
let running = null;

function isPlain(value, budget = [JSON_NODES], depth = 0) {
  if (value === null || typeof value === "string" || typeof value === "boolean") return true;
  if (typeof value === "number") return Number.isFinite(value);
  if (typeof value !== "object" || depth > 64 || util.types.isProxy(value)) return false;
  const prototype = Object.getPrototypeOf(value);
  if (!Array.isArray(value) && prototype !== Object.prototype && prototype !== null) return false;
  const members = Object.values(value);
  budget[0] -= members.length;
  return budget[0] >= 0 && members.every((member) => isPlain(member, budget, depth + 1));
}

const MAGIC = [
  ["image/png", Buffer.from("\x89PNG\r\n\x1a\n", "latin1")],
  ["image/jpeg", Buffer.from("\xff\xd8\xff", "latin1")],
  ["application/pdf", Buffer.from("%PDF-")],
];

function bundleOf(value) {
  const bundle = {};
  if (value !== null && (typeof value === "object" || typeof value === "function") && !util.types.isProxy(value)) {
    if (typeof value[DISPLAY] === "function") return value[DISPLAY]();
    if (value instanceof Uint8Array) {
      for (const [type, start] of MAGIC)
        if (start.equals(Buffer.from(value.buffer, value.byteOffset, Math.min(start.length, value.byteLength))))
          bundle[type] = value;
    } else if (typeof value === "object" && isPlain(value)) {
      bundle["application/json"] = value;
    }
  }
  bundle["text/plain"] = util.inspect(value, { maxArrayLength: 1000, maxStringLength: null, depth: 4 });
  return bundle;
}

function show(nonce, bundle, main) {
  for (const [type, value] of Object.entries(bundle)) {
    if (value === undefined) continue;
    part(nonce, type, type.endsWith("json") ? JSON.stringify(value) ?? "null" : value);
  }
  say(`show ${nonce} ${main ? "main" : "display"}`);
}

function publish(bundle) {
  const nonce = execution.getStore();
  if (nonce !== undefined && nonce === running) show(nonce, bundle, false);
}

function display(value, { raw = false } = {}) {
  publish(raw ? value : bundleOf(value));
}
for (const [name, type] of Object.entries({
  html: "text/html", markdown: "text/markdown", svg: "image/svg+xml", latex: "text/latex", json: "application/json",
  javascript: "application/javascript", text: "text/plain", png: "image/png", jpeg: "image/jpeg", pdf: "application/pdf",
}))
  display[name] = (value) => publish({ [type]: value });

// --- import ---------------------------------------------------------------------------------------------------------

// The engine's REPL mode cannot import; the code's `import` becomes calls of this function.
async function importModule(specifier, options) {
  specifier = String(specifier);
  const base = path.join(process.cwd(), "cell.js");
  const loader = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;
  if (loader !== undefined) {
    const { emitWarning } = process;
    process.emitWarning = () => {}; // that this loader is experimental is nothing to the cell
    try {
      const script = new vm.Script("(specifier, options) => import(specifier, options)", { filename: base, importModuleDynamically: loader });
      return script.runInThisContext()(specifier, options);
    } finally {
      process.emitWarning = emitWarning;
    }
  }
  if (/^(\.{0,2}\/)/.test(specifier)) specifier = pathToFileURL(path.resolve(process.cwd(), specifier)).href;
  else if (!isBuiltin(specifier) && !/^[a-z]+:/i.test(specifier))
    specifier = pathToFileURL(createRequire(base).resolve(specifier)).href;
  return import(specifier);
}

// Pieces that look like code and are none, and the words that matter. A slash after a value divides, else it begins a
// regular expression.
const TOKEN = /\/\/[^\n]*|\/\*[^]*?\*\/|"(?:\\[^]|[^"\\\n])*"|'(?:\\[^]|[^'\\\n])*'|[A-Za-z_$][\w$]*|\d[\w.]*|\s+|[^]/gy;
const REGULAR = /\/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\[\n])+\/[a-z]*/y;
const OPERATOR_WORDS = new Set(["return", "typeof", "case", "in", "of", "delete", "void", "throw", "new", "else", "do", "await", "yield", "instanceof"]);
const IMPORT = /import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)|\{([^}]*)\})?\s*from\s*("[^"\n]*"|'[^'\n]*')\s*;?|import\s*("[^"\n]*"|'[^'\n]*')\s*;?/y;

// Without an `await`, which would make what follows impossible to interrupt.
function builtinModule(specifier) {
  const module = require(specifier);
  return { ...module, default: module };
}

function rewriteImports(code) {
  if (!code.includes("import")) return code;
  let out = "", position = 0, previous = "", depth = 0;
  const templates = []; // depths of the braces that end a template's expression
  const text = (from) => { // a template's characters up to its end or to the next expression
    let at = from;
    while (at < code.length) {
      if (code[at] === "\\") at += 2;
      else if (code[at] === "`") return [at + 1, false];
      else if (code.startsWith("${", at)) return [at + 2, true];
      else at += 1;
    }
    return [at, false];
  };
  const copyTemplate = (from) => {
    const [end, expression] = text(from);
    out += code.slice(from, end);
    position = end;
    if (expression) templates.push(++depth);
    previous = expression ? "{" : "value";
  };
  while (position < code.length) {
    const character = code[position];
    if (character === "`" || (character === "}" && templates.at(-1) === depth)) {
      if (character === "}") { templates.pop(); depth -= 1; }
      out += character;
      copyTemplate(position + 1);
      continue;
    }
    if (character === "/" && !"/*".includes(code[position + 1] ?? "")) {
      REGULAR.lastIndex = position;
      const regular = /^(?:value|\)|\]|\})$/.test(previous) ? null : REGULAR.exec(code);
      if (regular) {
        out += regular[0];
        position = REGULAR.lastIndex;
        previous = "value";
        continue;
      }
    }
    TOKEN.lastIndex = position;
    const token = TOKEN.exec(code)[0];
    if (token === "import" && previous !== ".") {
      IMPORT.lastIndex = position;
      const found = depth === 0 ? IMPORT.exec(code) : null;
      if (found) {
        out += staticImport(found) + "\n".repeat(found[0].split("\n").length - 1);
        position = IMPORT.lastIndex;
        previous = ";";
        continue;
      }
      if (/^\s*\(/.test(code.slice(position + 6, position + 200))) {
        out += "__ringfence_import";
        position += 6;
        previous = "value";
        continue;
      }
    }
    out += token;
    position += token.length;
    if (token === "{" ) depth += 1;
    else if (token === "}") depth -= 1;
    if (!/^(?:\s|\/\/|\/\*)/.test(token)) previous = OPERATOR_WORDS.has(token) ? "(" : /^[\w$"']/.test(token) ? "value" : token;
  }
  return out;
}

function staticImport([, standard, namespace, named, from, bare]) {
  if (bare) return isBuiltin(bare.slice(1, -1)) ? ";" : `await __ringfence_import(${bare});`;
  const names = (named ?? "").split(",").map((item) => item.trim()).filter(Boolean)
    .map((item) => item.replace(/\s+as\s+/, ": "));
  if (standard) names.unshift(`default: ${standard}`);
  const call = isBuiltin(from.slice(1, -1)) ? `__ringfence_builtin(${from})` : `await __ringfence_import(${from})`;
  if (namespace) return `const ${namespace} = ${call};` + (names.length ? ` const {${names}} = ${namespace};` : "");
  return `const {${names}} = ${call};`;
}

// --- evaluation -----------------------------------------------------------------------------------------------------

const session = new inspector.Session();
session.connect();
let count = 0;
let stop = null; // ends the wait for a cell's promise

function call(method, parameters) {
  return new Promise((resolve, reject) =>
    session.post(method, parameters, (error, answer) => (error ? reject(new Error(error.message)) : resolve(answer))));
}

// The engine's side answers with a handle; this takes the value itself out of it.
let caught;
const catcherReady = (async () => {
  globalThis.__ringfence_catch = (value) => { caught = value; };
  const { result } = await call("Runtime.evaluate", { expression: "__ringfence_catch" });
  delete globalThis.__ringfence_catch;
  return result.objectId;
})();

async function valueOf(remote) {
  if (remote.objectId === undefined)
    return remote.type === "undefined" ? undefined : remote.unserializableValue !== undefined ? vm.runInThisContext(remote.unserializableValue) : remote.value;
  await call("Runtime.callFunctionOn", {
    objectId: await catcherReady, functionDeclaration: "function (value) { this(value); }", arguments: [{ objectId: remote.objectId }],
  });
  const value = caught;
  caught = undefined;
  session.post("Runtime.releaseObject", { objectId: remote.objectId });
  return value;
}

class Interrupted extends Error {}

function evaluate(code, nonce) {
  return new Promise((resolve, reject) => {
    stop = () => reject(new Interrupted());
    const post = () =>
      execution.run(nonce, () =>
        session.post("Runtime.evaluate", { expression: code, replMode: true, awaitPromise: true }, (error, answer) =>
          error ? reject(new Interrupted()) : resolve(answer)));
    try {
      // `breakOnSigint` ends whatever runs below it: all up to the first `await`. What follows runs elsewhere, where the
      // engine cannot be stopped without breaking it: a wait ends by `stop`, an endless loop takes the process along.
      Object.defineProperty(globalThis, "__ringfence_go", { value: post, configurable: true });
      goScript.runInThisContext({ breakOnSigint: true });
    } catch (error) {
      reject(error && error.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED" ? new Interrupted() : error);
    } finally {
      delete globalThis.__ringfence_go;
    }
  });
}
const goScript = new vm.Script("__ringfence_go()", { filename: "ringfence" });

process.on("SIGINT", () => stop && stop());

function describe(error, details, code, name) {
  if (!(util.types.isNativeError(error) || error instanceof Error))
    return { name: "Error", value: util.inspect(error), traceback: `Uncaught ${util.inspect(error)}` };
  const kind = String(error.name || "Error"), value = String(error.message);
  if (kind === "SyntaxError" && details && details.exception && details.stackTrace === undefined && !/\n\s+at .*cell-\d/.test(String(error.stack))) {
    const line = code.split("\n")[details.lineNumber];
    const place = line === undefined ? name : `${name}:${details.lineNumber + 1}\n${line}\n${" ".repeat(details.columnNumber)}^`;
    return { name: kind, value, traceback: `${place}\n${kind}: ${value}` };
  }
  const stack = String(error.stack ?? `${kind}: ${value}`);
  const cause = error.cause === undefined ? "" : `\n[cause]: ${util.inspect(error.cause)}`;
  return { name: kind, value, traceback: stack + cause };
}

// A stack ends where the driver begins.
Error.prepareStackTrace = (error, frames) => {
  const own = frames.findIndex((frame) => /^node:inspector$|^ringfence$/.test(frame.getFileName()) || frame.getFileName() === __filename);
  const text = util.types.isNativeError(error) || error instanceof Error ? Error.prototype.toString.call(error) : util.inspect(error);
  return [text, ...(own < 0 ? frames : frames.slice(0, own)).map((frame) => `    at ${frame}`)].join("\n");
};

function isObjectLiteral(code) {
  if (!/^\s*\{/.test(code) || !/\}\s*$/.test(code)) return false;
  try {
    new vm.Script(`(${code}\n)`);
    return true;
  } catch {
    return false;
  }
}

async function execute(nonce, code, variables) {
  count += 1;
  const name = `cell-${count}.js`;
  const before = variables.map(([key]) => [key, process.env[key]]);
  repairStreams();
  const put = (pairs) => pairs.forEach(([key, value]) => (value === undefined ? delete process.env[key] : (process.env[key] = value)));
  put(variables);
  running = nonce;
  let status = "ok", failure;
  try {
    const text = isObjectLiteral(code) ? `(${code}\n)` : rewriteImports(code);
    say(`begin ${nonce}`);
    const { result, exceptionDetails } = await evaluate(`${text}\n//# sourceURL=${name}`, nonce);
    stop = null;
    if (exceptionDetails) {
      failure = await valueOf(exceptionDetails.exception ?? { type: "undefined" });
      const words = describe(failure, exceptionDetails, code, name);
      for (const [key, value] of Object.entries(words)) part(nonce, key, value);
      say(`error ${nonce}`);
      status = "error";
    } else {
      const value = await valueOf(result);
      if (value !== undefined) show(nonce, bundleOf(value), true);
    }
  } catch (error) {
    if (error instanceof Interrupted) status = "interrupted";
    else {
      // What a value's own methods raised when it was shown.
      for (const [key, value] of Object.entries(describe(error))) part(nonce, key, value);
      say(`error ${nonce}`);
      status = "error";
    }
  }
  stop = running = null;
  complainOfRejected(failure);
  put(before);
  say(`done ${nonce} ${status}`);
}

// An exception in a timer, or in a promise that nobody waits for, ends nothing, as a thread's in Python. A promise that
// turns out to be the cell's own value has become its error.
let rejected = [];

function complain(error, what) {
  try {
    process.stderr.write(`[ringfence] ${what} outside of the cell's own flow:\n${(error && error.stack) || util.inspect(error)}\n`);
  } catch {
    // its stderr is broken; the next cell repairs it
  }
}

function complainOfRejected(known) {
  for (const error of rejected) if (error !== known) complain(error, "unhandled rejection");
  rejected = [];
}

process.on("uncaughtException", (error) => complain(error, "uncaught exception"));
process.on("unhandledRejection", (error) => {
  if (error instanceof Interrupted) return;
  rejected.push(error);
  if (running === null) complainOfRejected();
});

// --- requests -------------------------------------------------------------------------------------------------------

Object.assign(globalThis, { require: createRequire(path.join(process.cwd(), "cell.js")), module: { exports: {} }, exports: {}, display });
for (const [name, value] of [["__ringfence_import", importModule], ["__ringfence_builtin", builtinModule]])
  Object.defineProperty(globalThis, name, { value, writable: true, configurable: true });
repairStreams();

let buffer = Buffer.alloc(0);
let wanted = null; // wakes the reader
const socket = new net.Socket({ fd: fs.openSync(requestsPath, fs.constants.O_RDONLY | fs.constants.O_NONBLOCK), readable: true, writable: false });
socket.on("data", (bytes) => {
  buffer = Buffer.concat([buffer, bytes]);
  if (wanted) wanted();
});

async function take(enough) {
  for (;;) {
    const length = enough();
    if (length >= 0 && buffer.length >= length) {
      const piece = buffer.subarray(0, length);
      buffer = buffer.subarray(length);
      return piece;
    }
    await new Promise((resolve) => { wanted = resolve; });
    wanted = null;
  }
}
const line = async () => (await take(() => { const end = buffer.indexOf(10); return end < 0 ? -1 : end + 1; })).toString("utf8").trimEnd();
const bytes = async (length) => (await take(() => length)).toString("utf8");

(async () => {
  say("ready");
  for (;;) {
    const [, nonce, length, number] = (await line()).split(" ");
    const code = await bytes(Number(length));
    const variables = [];
    for (let index = 0; index < Number(number); index += 1) {
      const [key, size] = (await line()).split(" ").map(Number);
      const name = await bytes(key);
      variables.push([name, size < 0 ? undefined : await bytes(size)]);
    }
    // From a fresh turn of the event loop: microtasks of the cell run inside `evaluate` only if none runs around it.
    await new Promise((resolve) => setImmediate(() => execute(nonce, code, variables).then(resolve)));
  }
})();
