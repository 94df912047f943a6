// Requests to the admin API of the node that served this page, and what is known of the connection and the user.
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";
import { store } from "./store.js";
import { parse } from "./json.js";
import { onChange } from "./live.js";

const PATIENCE_MS = 30_000;
const SLOW_MS = 8000; // Then the user is told, although the answer may still come.
const EARLY_MS = 3000;
const TOGETHER_MS = 50;
/** Answers with values of users. What Holdfast itself counts is small enough for a double. */
const VALUES = /^\/(approvals\/[^/]+|services\/[^/]+\/[^/]+\/(state|promises)|invocations\/[^/]+(\/journal|\/steps\/[^/]+\/value)?)$/;
const COVERS = { read: ["read", "approve", "operate", "admin"], approve: ["approve", "operate", "admin"], operate: ["operate", "admin"], admin: ["admin"], invoke: ["invoke", "admin"] };

export const session = store(null); // of GET /session; null: not asked yet
export const connection = store({ up: true, since: 0, error: "" });

export class ApiError extends Error {
  constructor(status, answer) {
    super(answer.message || `the node answered with status ${status}`);
    this.status = status;
    this.hint = answer.hint || "";
    this.details = answer.details || [];
    this.names = answer.names || [];
  }

  /** The node is of a release without this endpoint. */
  get missing() {
    return this.status === 405 || (this.status === 404 && this.message.startsWith("there is nothing at"));
  }
}

export const may = (role) => (session.get()?.roles || []).some((each) => COVERS[role].includes(each));

export const mayInvoke = (service) => may("invoke") && (!session.get().services?.length || session.get().services.includes(service));

export function url(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export const segment = encodeURIComponent;

export async function ask(method, path, { query, body, signal, patience = PATIENCE_MS } = {}) {
  if (method !== "GET") sharing.clear();
  const options = { method, credentials: "same-origin", headers: {} };
  const limit = AbortSignal.timeout(patience);
  options.signal = signal ? AbortSignal.any([signal, limit]) : limit;
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const target = url(path, query);
  const began = Date.now();
  const lost = (error) => connection.get().up && connection.set({ up: false, since: began, error });
  const slow = method === "GET" ? setTimeout(() => !signal?.aborted && lost("the node does not answer"), SLOW_MS) : 0;
  let response;
  try {
    response = await (method === "GET" && !target.includes("?") ? shared(target, limit) : fetch(target, options));
  } catch (error) {
    if (signal?.aborted) throw error;
    const message = limit.aborted ? `the node did not answer within ${patience / 1000} s` : "the node does not answer";
    lost(message);
    throw new ApiError(0, { message, hint: "it is asked again by itself; other nodes show the same console" });
  } finally {
    clearTimeout(slow);
  }
  if (!connection.get().up) connection.set({ up: true, since: 0, error: "" });
  const answer = await (VALUES.test(path.split("?")[0]) ? response.text().then(parse) : response.json()).catch(() => ({}));
  if (response.ok) return answer;
  if (response.status === 401 && path !== "/session") await refreshSession();
  throw new ApiError(response.status, answer);
}

const sharing = new Map();

/**
 * Parts of a page that are drawn together ask the same: one request answers them. Later ones get an answer of their own, and so
 * does everything after an act. The first answers may be those that start.js asked for before this module was there.
 */
function shared(target, signal) {
  const now = Date.now();
  const known = sharing.get(target);
  if (known && now - known.at < TOGETHER_MS) return known.answer.then((answer) => answer.clone());
  const early = window.early?.get(target);
  window.early?.delete(target);
  const answer = early && now - early.at < EARLY_MS ? early.answer : fetch(target, { credentials: "same-origin", signal });
  sharing.set(target, { answer, at: now });
  setTimeout(() => sharing.get(target)?.at === now && sharing.delete(target), TOGETHER_MS);
  return answer.then((found) => found.clone());
}

export const get = (path, query, signal) => ask("GET", path, { query, signal });
export const post = (path, query, body) => ask("POST", path, { query, body });

/** Calls `load` when a node that did not answer answers again. */
export function useReturn(load) {
  useEffect(() => {
    let { up } = connection.get();
    return connection.watch((now) => {
      if (now.up && !up) load();
      ({ up } = now);
    });
  }, [load]);
}

export async function refreshSession() {
  const found = await get("/session");
  try {
    localStorage.setItem("known", found.node ? "yes" : ""); // start.js need not wait for the session next time.
  } catch {
    // Storage is blocked: it waits.
  }
  session.set(found);
}

/**
 * What a path answers, again on every change of these kinds (lib/live.js).
 * The last answer stays while a new one is asked for, and while the node does not answer.
 */
export function useGet(path, query = {}, { kinds = [], every = 0, filter } = {}) {
  const key = path && url(path, query);
  const [state, set] = useState({ key: null, data: null, error: null, loading: true });
  const running = useRef(null);
  const load = useCallback(async () => {
    if (!key) return;
    if (running.current?.key === key) {
      running.current.again = true;
      return;
    }
    running.current?.abort.abort();
    const run = (running.current = { key, abort: new AbortController(), again: false });
    do {
      run.again = false;
      try {
        const data = await get(key, {}, run.abort.signal);
        if (running.current === run) set({ key, data, error: null, loading: false });
      } catch (error) {
        if (run.abort.signal.aborted) return;
        if (running.current === run) set((old) => ({ key, data: old.key === key ? old.data : null, error, loading: false }));
        break;
      }
    } while (run.again && running.current === run);
    if (running.current === run) running.current = null;
  }, [key]);
  // Not after the next frame has been painted: the answer is what that frame waits for.
  useLayoutEffect(() => {
    load();
    return () => {
      running.current?.abort.abort();
      running.current = null;
    };
  }, [load]);
  useReturn(load);
  useEffect(() => (kinds.length ? onChange(kinds, load, filter) : undefined), [load, kinds.join(), JSON.stringify(filter)]);
  useEffect(() => {
    if (!every || state.error?.missing) return undefined;
    const timer = setInterval(() => document.visibilityState === "visible" && load(), every);
    return () => clearInterval(timer);
  }, [load, every, state.error?.missing]);
  const current = state.key === key ? state : { data: null, error: null, loading: true };
  return { ...current, reload: load };
}
