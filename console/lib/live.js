// Changes as they happen: one stream of GET /events for the whole page. A node without it is polled.
//
// Watchers get the events of one frame together. `reset` says that events were missed: load everything again.
import { store } from "./store.js";

const POLL_MS = 2500;
const RETRY_MS = [500, 1000, 2000, 5000, 10_000];

export const live = store({ mode: "off", paused: false }); // mode: off, connecting, live, polling

const watchers = new Set();
let abort = null;
let current = "";
let lastId = "";
let pending = [];
let scheduled = false;
let restart = 0;

/** Calls `watcher(events)` on events of these kinds. Returns the function that ends it. */
export function onEvents(kinds, watcher, filter) {
  const entry = { kinds: new Set(kinds), watcher, filter: filter || {} };
  watchers.add(entry);
  tune();
  return () => {
    watchers.delete(entry);
    tune();
  };
}

/** Calls `reload` after changes, at most every 400 ms. */
export function onChange(kinds, reload, filter) {
  let timer = 0;
  const end = onEvents(
    kinds,
    () => {
      timer ||= setTimeout(() => {
        timer = 0;
        reload();
      }, 400);
    },
    filter,
  );
  return () => {
    clearTimeout(timer);
    end();
  };
}

export function pause(paused) {
  live.set({ ...live.get(), paused });
  if (!paused) deliver([{ kind: "reset", data: { reason: "resumed" } }]);
}

function wanted() {
  const kinds = new Set([...watchers].flatMap((each) => [...each.kinds]));
  const filters = [...watchers].filter((each) => each.kinds.has("invocation")).map((each) => JSON.stringify(each.filter));
  const filter = new Set(filters).size === 1 ? JSON.parse(filters[0]) : {};
  return kinds.size ? new URLSearchParams({ kinds: [...kinds].sort().join(","), ...filter }).toString() : "";
}

/** Opens, changes or closes the stream, once the page has settled. */
function tune() {
  clearTimeout(restart);
  restart = setTimeout(() => {
    const query = wanted();
    if (query === current) return;
    current = query;
    lastId = "";
    abort?.abort();
    abort = null;
    if (query) run(query, (abort = new AbortController()).signal);
    else live.set({ ...live.get(), mode: "off" });
  }, 50);
}

async function run(query, signal) {
  for (let tries = 0; !signal.aborted; tries += 1) {
    try {
      const headers = lastId ? { "Last-Event-ID": lastId } : {};
      const response = await fetch(`/events?${query}`, { headers, signal, credentials: "same-origin" });
      if (response.status === 404 || response.status === 405) return poll(signal);
      if (response.ok) {
        tries = 0;
        live.set({ ...live.get(), mode: "live" });
        await read(response.body.getReader());
      } else {
        await response.body?.cancel();
      }
    } catch {
      // The connection ended. It is made again below, and the next answer tells what was missed.
    }
    if (signal.aborted) return undefined;
    live.set({ ...live.get(), mode: "connecting" });
    add({ kind: "reset", data: { reason: "reconnecting" } });
    await wait(RETRY_MS[Math.min(tries, RETRY_MS.length - 1)], signal);
  }
  return undefined;
}

async function poll(signal) {
  live.set({ ...live.get(), mode: "polling" });
  while (!signal.aborted) {
    await wait(POLL_MS, signal);
    if (!signal.aborted && document.visibilityState === "visible") add({ kind: "poll", data: {} });
  }
}

function wait(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

async function read(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  let event = { kind: "message", data: "", id: "" };
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.replace("\r", "") === "") {
        finish(event);
        event = { kind: "message", data: "", id: "" };
        continue;
      }
      const at = line.indexOf(":");
      const name = at < 0 ? line : line.slice(0, at);
      const text = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "").replace(/\r$/, "");
      if (name === "event") event.kind = text;
      else if (name === "data") event.data += text;
      else if (name === "id") event.id = text;
    }
  }
}

function finish(event) {
  if (event.id) lastId = event.id;
  if (!event.data) return;
  try {
    const data = JSON.parse(event.data);
    if (event.kind === "hello") {
      if (!data.resumed) add({ kind: "reset", data: { reason: "connected" } });
    } else {
      add({ kind: event.kind, data });
    }
  } catch {
    add({ kind: "reset", data: { reason: "an event could not be read" } });
  }
}

function add(event) {
  pending.push(event);
  if (pending.length > 5000) pending = [{ kind: "reset", data: { reason: "too many events" } }];
  if (scheduled) return;
  scheduled = true;
  const flush = () => {
    scheduled = false;
    const events = pending;
    pending = [];
    deliver(events);
  };
  // A hidden page has no frames.
  if (document.visibilityState === "visible") requestAnimationFrame(flush);
  else setTimeout(flush, 500);
}

/** The stream is filtered for one watcher; several with other filters share one that is not. */
function passes({ kind, data }, filter) {
  return kind !== "invocation" || Object.entries(filter).every(([name, value]) => data[name] === value);
}

function deliver(events) {
  if (live.get().paused) return;
  for (const entry of [...watchers]) {
    const some = events.filter((each) => each.kind === "reset" || each.kind === "poll" || (entry.kinds.has(each.kind) && passes(each, entry.filter)));
    if (some.length) entry.watcher(some);
  }
}
